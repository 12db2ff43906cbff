"""Every kind of damaged checkpoint that people have met (users.md §A), as functions that damage a good one.

`BAD` maps a readable id to (damage, words that the message must contain). The good one is `write_checkpoint`'s default:
six layers, one a shard, then the globals: shards 1..7.
"""

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], None]


def shard(directory: Path, number: int, of: int = 7) -> Path:
    """Return the path of shard `number` (from 1)."""
    return directory / f"model-{number:05d}-of-{of:06d}.safetensors"


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a shard; the data stays as it is."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def _replace(content: bytes, number: int = 3) -> Damage:
    return lambda directory: void(shard(directory, number).write_bytes(content))


def void(_: object) -> None:
    """Turn an expression into a statement."""


def _config(section: str, key: str, value: object) -> Damage:
    def change(config: dict[str, Any]) -> None:
        places = {"": config, "text": config["text_config"], "linear": config["text_config"]["linear_attn_config"]}
        places[section][key] = value

    return lambda directory: edit_json(directory / "config.json", change)


def _drop_config_keys(directory: Path) -> None:
    def drop(config: dict[str, Any]) -> None:
        del config["text_config"]["hidden_size"]
        del config["text_config"]["linear_attn_config"]["gate_lower_bound"]

    edit_json(directory / "config.json", drop)


def _delete(*numbers: int) -> Damage:
    return lambda directory: void([shard(directory, number).unlink() for number in numbers])


def _truncate(by: int) -> Damage:
    def cut(directory: Path) -> None:
        os.truncate(shard(directory, 3), shard(directory, 3).stat().st_size - by)

    return cut


def _cut_header(directory: Path) -> None:
    os.truncate(shard(directory, 3), 1000)


def _header(edit: Callable[[dict[str, Any]], None], number: int = 2) -> Damage:
    return lambda directory: edit_header(shard(directory, number), edit)


def _rename_tensor(header: dict[str, Any]) -> None:
    name = next(name for name in header if name.endswith("A_log"))
    header[name.replace("A_log", "A_logs")] = header.pop(name)


def _transpose(header: dict[str, Any]) -> None:
    entry = header["language_model.model.layers.1.self_attn.o_norm.weight"]
    entry["shape"] = [*entry["shape"], 1]


def _overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name.endswith("layernorm.weight")]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def _span(header: dict[str, Any]) -> None:
    next(iter(header.values()))["data_offsets"][1] += 4


def _dtype(header: dict[str, Any]) -> None:
    header["language_model.model.layers.1.input_layernorm.weight"]["dtype"] = "F16"


def _unknown_dtype(header: dict[str, Any]) -> None:
    next(iter(header.values()))["dtype"] = "Q4_K"


def _two_layers_less(directory: Path) -> None:
    """A conversion that published holes: every file is whole, two layers are in none of them."""
    for number in (4, 5):
        shard(directory, number).unlink()

    def drop(index: dict[str, Any]) -> None:
        kept = {name: file for name, file in index["weight_map"].items() if ".layers.3." not in name}
        index["weight_map"] = {name: file for name, file in kept.items() if ".layers.4." not in name}

    edit_json(directory / INDEX, drop)


def _move_claim(directory: Path) -> None:
    name = "language_model.model.layers.1.input_layernorm.weight"
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({name: shard(directory, 1).name}))


def _claim_more(directory: Path) -> None:
    name = "language_model.model.layers.1.self_attn.rotary.inv_freq"
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({name: shard(directory, 2).name}))


def _claim_less(directory: Path) -> None:
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop("language_model.model.norm.weight"))


def _held_twice(directory: Path) -> None:
    (directory / INDEX).unlink()
    shutil.copy(shard(directory, 2), directory / "copy.safetensors")


def _dangling(directory: Path) -> None:
    shard(directory, 3).unlink()
    shard(directory, 3).symlink_to(directory / "blobs" / "gone")


def _directory_in_place(directory: Path) -> None:
    shard(directory, 3).unlink()
    shard(directory, 3).mkdir()


def _pipe_in_place(directory: Path) -> None:
    shard(directory, 3).unlink()
    os.mkfifo(shard(directory, 3))


def _write(name: str, content: bytes) -> Damage:
    return lambda directory: void((directory / name).write_bytes(content))


def _no_shards(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16990911504\n"
HTML = b"<!DOCTYPE html><html><title>Log in</title></html>"
HUGE = (2**62).to_bytes(8, "little") + b"{" * 100

BAD: dict[str, tuple[Damage, list[str]]] = {
    "shard absent": (_delete(3), ["shard 3 of 7 absent", "layer 2", "Resume the download", "model-00003-of-000007"]),
    "shards absent": (_delete(3, 4, 5), ["shards 3-5 of 7 absent", "layers 2-4"]),
    "last shard absent": (_delete(7), ["shard 7 of 7 absent", "embed_tokens"]),
    "all shards absent": (_no_shards, ["no *.safetensors file"]),
    "truncated": (_truncate(100), ["model-00003-of-000007", "100 missing", "Resume"]),
    "too long": (_truncate(-100), ["model-00003-of-000007", "100 bytes more"]),
    "header cut": (_cut_header, ["partial download", "model-00003-of-000007"]),
    "five bytes": (_replace(b"12345"), ["partial download", "5 bytes"]),
    "empty": (_replace(b""), ["is empty"]),
    "lfs pointer": (_replace(LFS), ["Git-LFS pointer", "16,990,911,504", "git lfs pull"]),
    "html": (_replace(HTML), ["HTML page", "fetch it again"]),
    "json error": (_replace(b'{"error": "Repository not found"}'), ["JSON text", "fetch it again"]),
    "gzip": (_replace(gzip.compress(b"x" * 100)), ["gzip"]),
    "pickle": (_replace(pickle.dumps({"a": list(range(100))})), ["pickle"]),
    "zip pickle": (_replace(b"PK\x03\x04" + b"\0" * 100), ["pickle"]),
    "gguf": (_replace(b"GGUF" + b"\x03\0\0\0" * 30), ["GGUF"]),
    "zeros": (_replace(bytes(4096)), ["zeros"]),
    "absurd header length": (_replace(HUGE), ["header length 4,611,686,018,427,387,904"]),
    "header not json": (_replace((16).to_bytes(8, "little") + b'{"a": [1, 2, 3 !'), ["damaged header"]),
    "header not utf-8": (_replace((14).to_bytes(8, "little") + b'{"\xff\xfe\xff": 12345}'), ["damaged header"]),
    "name twice": (_replace((14).to_bytes(8, "little") + b'{"a":1, "a":2}'), ["'a' appears twice"]),
    "dangling link": (_dangling, ["link to", "gone", "does not exist"]),
    "directory in place of a shard": (_directory_in_place, ["is a directory"]),
    "pipe in place of a shard": (_pipe_in_place, ["not a regular file"]),
    "unfinished download": (
        lambda directory: void(Path(f"{shard(directory, 3)}.aria2").touch()), ["not finished", "shard 3 of 7"],
    ),
    "all lfs pointers": (
        lambda directory: void([_replace(LFS, number)(directory) for number in range(1, 8)]),
        ["Git-LFS pointer", "4 more files", "shards 4-7 of 7"],
    ),
    "layers never converted": (_two_layers_less, ["config.json implies are missing", "layers 3-4"]),
    "tensor renamed": (_header(_rename_tensor), ["A_logs", "does not imply", "not in their shard"]),
    "wrong shape": (_header(_transpose), ["o_norm.weight", "F32 [32, 1], expected F32 [32]"]),
    "wrong dtype": (_header(_dtype), ["input_layernorm.weight", "F16 [64], expected BF16 [64]"]),
    "unknown dtype": (_header(_unknown_dtype), ["dtype 'Q4_K' is unknown"]),
    "overlap": (_header(_overlap), ["overlap", "layernorm.weight"]),
    "span differs from shape": (_header(_span), ["needs", "span"]),
    "tensor in another shard": (_move_claim, ["is in model-00002-of-000007", "not in model-00001-of-000007"]),
    "index claims more": (_claim_more, ["inv_freq", "named by the index but not in their shard"]),
    "index claims less": (_claim_less, ["model.norm.weight", "not in the index"]),
    "held twice": (_held_twice, ["held by two shards"]),
    "index empty": (_write(INDEX, b""), [INDEX, "is empty"]),
    "index not json": (_write(INDEX, b'{"weight_map": {"a"'), [INDEX, "not valid JSON"]),
    "index lfs pointer": (_write(INDEX, LFS), [INDEX, "Git-LFS pointer"]),
    "index without map": (_write(INDEX, b"[]"), [INDEX, "no weight_map"]),
    "index leaves the directory": (_write(INDEX, b'{"weight_map": {"a": "../b.safetensors"}}'), ["../b.safetensors"]),
    "config absent": (lambda directory: (directory / "config.json").unlink(), ["config.json is missing"]),
    "config empty": (_write("config.json", b""), ["config.json is empty"]),
    "config not json": (_write("config.json", b'{"model_type": "kimi_k3"'), ["not valid JSON"]),
    "config lfs pointer": (_write("config.json", LFS), ["Git-LFS pointer"]),
    "config html": (_write("config.json", HTML), ["HTML page"]),
    "config of another model": (_write("config.json", b'{"model_type": "llama"}'), ["'llama'", "kimi_k3"]),
    "config keys missing": (
        _drop_config_keys, ["missing: text_config.hidden_size", "text_config.linear_attn_config.gate_lower_bound"],
    ),
    "config key misspelt": (_config("text", "num_experts_per_tok", 2), ["did you mean num_experts_per_token?"]),
    "top-k above experts": (_config("text", "num_experts_per_token", 9), ["num_experts_per_token is 9", "at most"]),
    "layer list 0-based": (_config("linear", "full_attn_layers", [2, 4, 5]), ["1..6", "counted from 1"]),
    "config of other width": (_config("text", "hidden_size", 128), ["wrong dtype or shape", "expected"]),
    "config of more layers": (
        lambda directory: edit_json(directory / "config.json", _seven_layers), ["implies are missing", "layer 6"],
    ),
}  # fmt: skip


def _seven_layers(config: dict[str, Any]) -> None:
    config["text_config"]["num_hidden_layers"] = 7
    config["text_config"]["first_k_dense_replace"] = 1
    config["text_config"]["linear_attn_config"]["kda_layers"].append(7)
