"""config.json is read strictly; expected values come from k3-spec §1."""

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.config import load
from streamer.config.errors import ConfigError
from streamer.config.load import load_generation_defaults, load_model_config
from streamer.config.parse import parse_model_config
from tests.checkpoints import RELEASED, Dims, make_config, write_json


@pytest.fixture
def values() -> dict[str, Any]:
    return make_config(Dims())


def section(values: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.split("."):
        values = values[name] if name else values
    return values


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(values, "config.json")
    return str(caught.value)


def test_released_configuration() -> None:
    config = parse_model_config(make_config(RELEASED), "config.json")
    assert (config.n_layers, config.hidden_size, config.vocab_size) == (93, 7168, 163840)
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert config.moe_layers == tuple(range(1, 93))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert (config.kda.n_heads, config.kda.head_dim, config.kda.conv_kernel, config.kda.gate_lower_bound) == (
        96, 128, 4, -5.0,
    )  # fmt: skip
    assert (config.mla.qk_head_dim, config.mla.cache_width, config.mla.latent_norm_eps) == (192, 576, 1e-6)
    assert (config.moe.n_experts, config.moe.top_k, config.moe.shared_intermediate_size) == (896, 16, 6144)
    assert (config.moe.latent_size, config.moe.intermediate_size, config.moe.routed_scaling_factor) == (3584, 3072, 1.0)
    assert (config.situ_beta, config.situ_linear_beta, config.rms_norm_eps) == (4.0, 25.0, 1e-5)
    assert (config.attn_res_block_size, config.dense_intermediate_size) == (12, 33792)
    assert config.has_vision
    assert config.vision is not None
    assert config.vision.merged_size == 4096


NEEDED = {
    "": ["model_type", "text_config"],
    "text_config": [
        "activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size", "first_k_dense_replace",
        "hidden_act", "hidden_size", "intermediate_size", "kv_lora_rank", "latent_moe_use_norm", "linear_attn_config",
        "max_position_embeddings", "mla_use_nope", "mla_use_output_gate", "moe_intermediate_size", "moe_layer_freq",
        "moe_renormalize", "moe_router_activation_func", "num_attention_heads", "num_expert_group", "num_experts",
        "num_experts_per_token", "num_hidden_layers", "num_shared_experts", "q_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "quantization_config", "rms_norm_eps", "routed_expert_hidden_size", "routed_scaling_factor",
        "tie_word_embeddings", "topk_group", "topk_method", "v_head_dim", "vocab_size",
    ],
    "text_config.linear_attn_config": [
        "full_attn_layers", "gate_lower_bound", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size",
        "use_full_rank_gate",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("path", "key"), [(path, key) for path, keys in NEEDED.items() for key in keys])
def test_no_key_that_an_equation_needs_has_a_default(values: dict[str, Any], path: str, key: str) -> None:
    null = copy.deepcopy(values)
    del section(values, path)[key]
    assert key in refused(values)
    section(null, path)[key] = None
    assert key in refused(null)


def test_all_missing_keys_are_named_at_once(values: dict[str, Any]) -> None:
    gone = ["hidden_size", "q_lora_rank", "vocab_size"]
    for key in gone:
        del values["text_config"][key]
    del values["text_config"]["linear_attn_config"]["num_heads"]
    text = refused(values)
    assert text.count("missing:") == 1
    assert all(f"text_config.{key}" in text for key in [*gone, "linear_attn_config.num_heads"])


@pytest.mark.parametrize(
    ("path", "key", "value", "said"),
    [
        ("", "model_type", "kimi_linear", "is a 'kimi_linear' model"),
        ("", "model_type", "deepseek_v3", "this engine runs 'kimi_k3'"),
        ("text_config", "model_type", "llama", "expected 'kimi_linear'"),
        ("text_config", "hidden_act", "silu", "expected 'situ'"),
        ("text_config", "moe_router_activation_func", "softmax", "expected 'sigmoid'"),
        ("text_config", "topk_method", "greedy", "expected 'noaux_tc'"),
        ("text_config", "num_expert_group", 8, "expected 1"),
        ("text_config", "topk_group", 4, "expected 1"),
        ("text_config", "moe_layer_freq", 2, "expected 1"),
        ("text_config", "tie_word_embeddings", True, "expected False"),
        ("text_config", "mla_use_nope", False, "expected True"),
        ("text_config", "mla_use_output_gate", False, "expected True"),
        ("text_config", "latent_moe_use_norm", False, "expected True"),
        ("text_config", "moe_renormalize", False, "expected True"),
        ("text_config", "moe_renormalize", 1, "expected True"),
        ("text_config", "num_nextn_predict_layers", 1, "expected 0"),
        ("text_config", "attention_bias", True, "expected False"),
        ("text_config", "rope_theta", 10000.0, "no positional encoding"),
        ("text_config", "num_key_value_heads", 1, "expected 2"),
        ("text_config", "num_experts_per_token", 9, "at most num_experts 8"),
        ("text_config", "num_experts_per_token", 0, "at least 1"),
        ("text_config", "num_experts", 70000, "at most 65536"),
        ("text_config", "routed_expert_hidden_size", 48, "a multiple of 32"),
        ("text_config", "moe_intermediate_size", 100, "a multiple of 32"),
        ("text_config", "first_k_dense_replace", 6, "less than num_hidden_layers 6"),
        ("text_config", "first_k_dense_replace", -1, "at least 0"),
        ("text_config", "hidden_size", "64", "an integer"),
        ("text_config", "hidden_size", 64.0, "an integer"),
        ("text_config", "hidden_size", True, "an integer"),
        ("text_config", "hidden_size", -64, "at least 1"),
        ("text_config", "rms_norm_eps", 0, "above 0"),
        ("text_config", "rms_norm_eps", float("nan"), "a finite number"),
        ("text_config", "rms_norm_eps", "1e-5", "a finite number"),
        ("text_config", "routed_scaling_factor", -1.0, "above 0"),
        ("text_config", "eos_token_id", 300, "below vocab_size 300"),
        ("text_config", "linear_attn_config", [], "an object"),
        ("", "text_config", {}, "is empty"),
        ("text_config.quantization_config", "config_groups", {}, "a group"),
        ("text_config", "num_hidden_layers", 7, "absent 7"),
        ("text_config", "num_hidden_layers", 5, "outside 6"),
        ("text_config", "num_hidden_layers", 10**9, "at most 4096"),
        ("text_config.linear_attn_config", "use_full_rank_gate", False, "expected True"),
        ("text_config.linear_attn_config", "gate_lower_bound", 5.0, "below 0"),
        ("text_config.linear_attn_config", "num_heads", 33, "at most head_dim 32"),
        ("text_config.linear_attn_config", "full_attn_layers", [2, 4, 5], "counted from 1"),
        ("text_config.linear_attn_config", "full_attn_layers", [3, 5], "absent 6"),
        ("text_config.linear_attn_config", "full_attn_layers", [3, 4, 5, 6], "named twice 4"),
        ("text_config.linear_attn_config", "full_attn_layers", [3, 5, "6"], "a list of integers"),
        ("text_config.quantization_config", "format", "pack-quantized", "mxfp4-pack-quantized"),
        ("text_config.quantization_config.config_groups.group_0.weights", "group_size", 16, "expected 32"),
        ("text_config.quantization_config.config_groups.group_0.weights", "num_bits", 8, "expected 4"),
        ("text_config", "num_experts_per_tok", 2, "did you mean num_experts_per_token?"),
        ("text_config", "sliding_window", 4096, "text_config.sliding_window is not a key"),
        ("text_config.linear_attn_config", "num_head", 2, "did you mean num_heads?"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    values: dict[str, Any], path: str, key: str, value: object, said: str
) -> None:
    section(values, path)[key] = value
    text = refused(values)
    assert key in text
    assert said in text


@pytest.mark.parametrize(
    "key", ["initializer_range", "use_cache", "torch_dtype", "transformers_version", "auto_map", "output_attentions"]
)
def test_inert_keys_pass(values: dict[str, Any], key: str) -> None:
    values["text_config"][key] = "anything"
    values["text_config"]["sliding_window"] = None
    values["anything_at_the_top"] = 1
    assert parse_model_config(values, "config.json").hidden_size == 64


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("text_config", "num_experts", 10**9),
        ("text_config", "num_experts", "many"),
        ("text_config", "vocab_size", -1),
        ("text_config", "num_hidden_layers", 10**9),
        ("text_config", "num_hidden_layers", -1),
        ("text_config", "num_attention_heads", 0),
        ("text_config", "rms_norm_eps", "x"),
        ("text_config.linear_attn_config", "head_dim", "x"),
        ("text_config.linear_attn_config", "gate_lower_bound", "x"),
        ("text_config.linear_attn_config", "kda_layers", "x"),
    ],
)
def test_a_refused_value_causes_no_second_complaint(values: dict[str, Any], path: str, key: str, value: object) -> None:
    section(values, path)[key] = value
    _, *problems = refused(values).splitlines()
    assert len(problems) == 1, problems
    assert key in problems[0]


def test_a_head_without_weights_is_refused_in_either_place(values: dict[str, Any]) -> None:
    values["text_config"]["tie_word_embeddings"] = False
    values["tie_word_embeddings"] = True
    assert "tie_word_embeddings is True; expected False" in refused(values)
    del values["text_config"]["tie_word_embeddings"]
    values["tie_word_embeddings"] = False
    assert parse_model_config(values, "config.json").n_layers == 6


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_token_ids_may_sit_in_either_place(values: dict[str, Any], key: str) -> None:
    expected = parse_model_config(values, "config.json")
    for place in (values, values["text_config"]):
        kept = place.pop(key)
        assert parse_model_config(values, "config.json") == expected
        place[key] = kept
    values[key] += -1
    assert key in refused(values)
    del values[key], values["text_config"][key]
    assert f"missing: text_config.{key}" in refused(values)


@given(st.data(), st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]) | st.just({}))
def test_any_value_is_honoured_or_refused(data: st.DataObject, value: object) -> None:
    values = make_config(Dims(vision=True))
    path = data.draw(st.sampled_from(["", "text_config", "text_config.linear_attn_config", "vision_config"]))
    place = section(values, path)
    key = data.draw(st.sampled_from(sorted(place)))
    place[key] = value
    with contextlib.suppress(ConfigError):
        assert parse_model_config(values, "config.json").n_layers == 6


def test_vision_is_optional(values: dict[str, Any]) -> None:
    assert not parse_model_config(values, "config.json").has_vision
    del values["vision_config"]
    assert not parse_model_config(values, "config.json").has_vision
    values["vision_config"] = {"patch_size": 14}
    assert "vision_config.vt_hidden_size" in refused(values)


def test_first_directory_with_a_configuration_wins(tmp_path: Path, values: dict[str, Any]) -> None:
    for name, hidden in {"a": None, "b": 64, "c": 128}.items():
        (tmp_path / name).mkdir()
        if hidden:
            values["text_config"]["hidden_size"] = hidden
            write_json(tmp_path / name / "config.json", values)
    assert load_model_config([tmp_path / name for name in "abc"]).hidden_size == 64


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"[]", "JSON list"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"\xff\xfe{", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<html></html>", "HTML page"),
    ],
)
def test_unreadable_file(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_model_config([tmp_path])
    assert str(tmp_path / "config.json") in str(caught.value)


def test_places_that_are_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "config.json").symlink_to(tmp_path / "gone")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    said = {
        "absent": "no such directory", "model.gguf": "is a file", "empty": "config.json is missing", "": "GGUF",
        "link": "a link to", "folder": "Is a directory",
    }  # fmt: skip
    for name, text in said.items():
        with pytest.raises(ConfigError, match=text):
            load_model_config([tmp_path / name])
    with pytest.raises(ConfigError, match="no model directory"):
        load_model_config([])


def test_generation_defaults(tmp_path: Path, values: dict[str, Any]) -> None:
    write_json(tmp_path / "config.json", values)
    defaults = load_generation_defaults([tmp_path])
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.eos_token_ids) == (1.0, 0.95, 0, (46,))
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "top_k": 20, "eos_token_id": [46, 45, 46]})
    defaults = load_generation_defaults([tmp_path])
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.eos_token_ids) == (0.6, 0.95, 20, (46, 45))
    write_json(tmp_path / "generation_config.json", {"do_sample": False})
    assert load_generation_defaults([tmp_path]).temperature == 0.0


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": 500},
        {"top_k": 10**12},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"eos_token_id": 300},
        {"eos_token_id": []},
    ],
)
def test_impossible_generation_defaults(tmp_path: Path, values: dict[str, Any], bad: dict[str, Any]) -> None:
    write_json(tmp_path / "config.json", values)
    write_json(tmp_path / "generation_config.json", bad)
    with pytest.raises(ConfigError, match=next(iter(bad))):
        load_generation_defaults([tmp_path])


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load.cache_directory() == tmp_path / "moe-streamer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load.cache_directory() == tmp_path / ".cache" / "moe-streamer"
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError, match="no home directory"):
        load.cache_directory()
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert not load.no_color()
    monkeypatch.setenv("TERM", "dumb")
    assert load.no_color()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert load.no_color()


def test_thread_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in load.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert load.requested_threads() is None
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not load.set_thread_variables(3)
    assert load.requested_threads() == 3
    monkeypatch.delitem(sys.modules, "numba")
    assert load.set_thread_variables(2)
    with pytest.raises(ValueError, match="at least 1"):
        load.set_thread_variables(0)


def test_configuration_is_json_round_trip_safe(values: dict[str, Any]) -> None:
    again = json.loads(json.dumps(values))
    assert parse_model_config(again, "a") == parse_model_config(values, "b")


def test_prepare_kernels_sets_what_the_user_has_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load.prepare_kernels()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "1000")
    cache = Path(os.environ["NUMBA_CACHE_DIR"])
    assert cache.is_dir()
    assert cache.parent == tmp_path / "moe-streamer" / "kernels"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/elsewhere")
    load.prepare_kernels()
    assert "GOMP_SPINCOUNT" not in os.environ
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["NUMBA_CACHE_DIR"]) == ("ACTIVE", "/elsewhere")


def test_kernels_are_cached_elsewhere_where_no_cache_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    load.prepare_kernels()
    assert not os.environ["NUMBA_CACHE_DIR"].startswith(str(tmp_path / "file"))


def test_kernels_are_cached_elsewhere_where_the_drive_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "KERNEL_CACHE_BYTES", 2**62)
    monkeypatch.setattr(load.tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    load.prepare_kernels()
    directory = Path(os.environ["NUMBA_CACHE_DIR"])
    assert directory.parent == tmp_path / "t"
    assert directory.is_dir()
    assert not load.kernels_are_cached()
    (directory / "a.nbi").touch()
    assert load.kernels_are_cached()
    (next((tmp_path / "moe-streamer" / "kernels").iterdir()) / "a.nbi").touch()  # what is there needs no room
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    load.prepare_kernels()
    assert os.environ["NUMBA_CACHE_DIR"].startswith(str(tmp_path / "moe-streamer"))
