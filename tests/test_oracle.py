"""Self-checks of the float64 oracle against hand-computed values and a second, scalar reading of k3-spec §3."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import write_checkpoint
from tests.oracle import Oracle, bf16, causal_conv, kda_recurrence, mix, mxfp4, read_config, rms, select, situ

IDS = [5, 17, 5, 250, 99, 1, 1, 42, 7]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers: KDA at 0, 1 and 3, MLA at 2, 4 and 5; blocks of 2; dense layer 0; 8 experts, 2 of them used."""
    path = tmp_path_factory.mktemp("k3")
    write_checkpoint(path, seed=3)
    return path


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


def scalar_sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_bf16_decodes_known_bits() -> None:
    bits = np.array([0x3FC0, 0xC040, 0x0000, 0x3F80, 0x4049], np.uint16)
    assert bf16(bits).tolist() == [1.5, -3.0, 0.0, 1.0, 3.140625]


def test_mxfp4_nibble_order_and_scale_groups() -> None:
    packed = np.zeros((2, 32), np.uint8)  # two rows of 64 elements, two scale groups each
    packed[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # nibbles 0, 1, 2, ... 15
    packed[0, 16] = 0x21
    packed[1, 15] = 0xF2
    packed[1, 31] = 0x0F
    scale = np.array([[127, 126], [129, 120]], np.uint8)
    got = mxfp4(packed, scale)
    assert got.shape == (2, 64)
    assert got[0, :16].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert got[0, 32:34].tolist() == [0.25, 0.5]  # 0.5 and 1 under 2^-1
    assert got[1, 30:32].tolist() == [4.0, -24.0]  # 1 and -6 under 2^2
    assert got[1, 62:].tolist() == [-6 / 128, 0.0]  # low nibble first
    assert np.count_nonzero(got) == 14 + 2 + 2 + 1


def test_mxfp4_refuses_nan_scale_and_wrong_shape() -> None:
    packed = np.zeros((1, 16), np.uint8)
    with pytest.raises(ValueError, match="NaN"):
        mxfp4(packed, np.array([[255]], np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        mxfp4(packed, np.zeros((1, 2), np.uint8))


def test_tensors_are_the_bytes_of_the_file(directory: Path, oracle: Oracle) -> None:
    name = "language_model.model.layers.4.block_sparse_moe.experts.6.w2.weight_packed"
    shard = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    data = (directory / shard).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    start, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    byte = data[8 + length + start + 3]  # elements 6 and 7 of row 0
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    scale = oracle.shards.raw(name.removeprefix("language_model.").replace("packed", "scale"))[0, 0]
    pair = [(-1) ** (nibble >> 3) * table[nibble & 7] * 2.0 ** (int(scale) - 127) for nibble in (byte & 15, byte >> 4)]
    got = oracle.shards.mxfp4("model.layers.4.block_sparse_moe.experts.6.w2")
    assert got[0, 6:8].tolist() == pair


def test_rms_has_eps_inside_the_root() -> None:
    got = rms(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 12.5)  # sqrt(12.5 + 12.5) = 5
    np.testing.assert_allclose(got, [[0.6, 1.6]], rtol=1e-15)


def test_situ_caps_both_sides_and_gates_with_the_raw_value() -> None:
    expected = 4 * math.tanh(8 / 4) * scalar_sigmoid(8) * 25 * math.tanh(-3 / 25)
    got = situ(np.array([8.0, 1e6, -1e6]), np.array([-3.0, 1e6, 1e6]))
    np.testing.assert_allclose(got, [expected, 100.0, 0.0], rtol=1e-14)


def test_conv_puts_the_last_tap_on_the_current_token() -> None:
    u = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [5.0, 50.0]])
    taps = np.array([[1000.0, 100.0, 10.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    got = causal_conv(u, taps)
    assert got[:, 0].tolist() == [1, 12, 123, 1234, 2345]
    assert got[:, 1].tolist() == [0, 10, 20, 30, 40]


def test_kda_recurrence_on_two_tokens_by_hand() -> None:
    # S0 = k (β v)ᵀ = [1 2]ᵀ [1 2] = [[1, 2], [2, 4]]; o0 = 3·[1, 2] + 5·[2, 4] = [13, 26].
    # αS = [[.5, 1], [1.5, 3]]; r = Sᵀk = [-1, -2]; β(v - r) = [1, 1]; S1 = [[1.5, 2], [.5, 2]]; o1 = 2·row 0 + row 1.
    q, k = np.array([[[3.0, 5.0]], [[2.0, 1.0]]]), np.array([[[1.0, 2.0]], [[1.0, -1.0]]])
    v, alpha = np.array([[[2.0, 4.0]], [[1.0, 0.0]]]), np.array([[[0.1, 0.9]], [[0.5, 0.75]]])
    beta = np.array([[0.5], [0.5]])
    assert kda_recurrence(q, k, v, alpha, beta)[:, 0].tolist() == [[13.0, 26.0], [3.5, 6.0]]


def test_kda_layer_against_scalar_loops(oracle: Oracle) -> None:
    """§3.3 once more, one number at a time, with the weights of layer 1."""
    heads, dim, name = 2, 32, "model.layers.1.self_attn"
    x = np.random.default_rng(0).standard_normal((6, 64))
    w = {key: oracle.weight(f"{name}.{key}_proj") for key in ("q", "k", "v", "g", "o", "b", "f_a", "f_b")}
    taps = {key: oracle.weight(f"{name}.{key}_conv1d") for key in "qkv"}
    a_log, dt, norm = (oracle.weight(f"{name}.{key}") for key in ("A_log", "dt_bias", "o_norm"))

    def conv(key: str, t: int, channel: int) -> float:
        c = sum(taps[key][channel, 0, j] * (w[key][channel] @ x[t - 3 + j]) for j in range(4) if t - 3 + j >= 0)
        return c * scalar_sigmoid(c)

    state = np.zeros((heads, dim, dim))
    expected = np.zeros((6, 64))
    for t in range(6):
        y = []
        for h in range(heads):
            q, k, v = ([conv(key, t, h * dim + i) for i in range(dim)] for key in "qkv")
            q = [value / math.sqrt(sum(e * e for e in q) + 1e-6) / math.sqrt(dim) for value in q]
            k = [value / math.sqrt(sum(e * e for e in k) + 1e-6) for value in k]
            beta = scalar_sigmoid(w["b"][h] @ x[t])
            for i in range(dim):
                z = w["f_b"][h * dim + i] @ (w["f_a"] @ x[t])
                state[h, i] *= math.exp(-5 * scalar_sigmoid(math.exp(a_log[h]) * (z + dt[h * dim + i])))
            recalled = [sum(state[h, i, j] * k[i] for i in range(dim)) for j in range(dim)]
            for i in range(dim):
                for j in range(dim):
                    state[h, i, j] += k[i] * beta * (v[j] - recalled[j])
            o = [sum(state[h, i, j] * q[i] for i in range(dim)) for j in range(dim)]
            root = math.sqrt(sum(e * e for e in o) / dim + 1e-5)
            y += [o[j] / root * norm[j] * scalar_sigmoid(w["g"][h * dim + j] @ x[t]) for j in range(dim)]
        expected[t] = w["o"] @ np.array(y)
    np.testing.assert_allclose(oracle.kda(x, name), expected, rtol=1e-9, atol=1e-12)


def test_mla_layer_against_the_absorbed_form(oracle: Oracle) -> None:
    """§3.4 "absorbed (decode)", token by token over a cache of latents, with the weights of layer 4."""
    heads, nope, rope, v_dim, rank, name = 2, 16, 8, 16, 32, "model.layers.4.self_attn"
    x = np.random.default_rng(1).standard_normal((7, 64))
    w = {key: oracle.weight(f"{name}.{key}_proj") for key in ("q_a", "q_b", "kv_b", "g", "o")}
    kv_b = w["kv_b"].reshape(heads, nope + v_dim, rank)
    cache: list[tuple[np.ndarray, np.ndarray]] = []
    expected = []
    for token in x:
        c = oracle.weight(f"{name}.kv_a_proj_with_mqa") @ token
        cache.append((rms(c[:rank], oracle.weight(f"{name}.kv_a_layernorm"), 1e-6), c[rank:]))
        q = w["q_b"] @ rms(w["q_a"] @ token, oracle.weight(f"{name}.q_a_layernorm"), 1e-6)
        out = []
        for h in range(heads):
            q_nope, q_rope = np.split(q[h * (nope + rope) : (h + 1) * (nope + rope)], [nope])
            absorbed = kv_b[h, :nope].T @ q_nope
            scores = [math.exp((absorbed @ latent + q_rope @ key) / math.sqrt(nope + rope)) for latent, key in cache]
            context = sum(s / sum(scores) * latent for s, (latent, _) in zip(scores, cache, strict=True))
            out.append(kv_b[h, nope:] @ context)
        gate = np.array([scalar_sigmoid(value) for value in w["g"] @ token])
        expected.append(w["o"] @ (np.concatenate(out) * gate))
    np.testing.assert_allclose(oracle.mla(x, name), expected, rtol=1e-9, atol=1e-12)
    assert not np.allclose(Oracle.mla(_with_eps(oracle, 1e-2), x, name), expected, rtol=1e-4)


def _with_eps(oracle: Oracle, eps: float) -> Oracle:
    other = object.__new__(Oracle)
    other.__dict__.update(oracle.__dict__, mla_eps=eps)
    return other


def test_moe_layer_against_scalar_loops(oracle: Oracle) -> None:
    """§3.5 and §3.6, one token at a time, with the weights of layer 3."""
    name = "model.layers.3.block_sparse_moe"
    x = np.random.default_rng(2).standard_normal((5, 64))
    result = oracle.forward([0])
    got = oracle.ffn(x, 3, result, None, 1e-4)
    bias = oracle.weight(f"{name}.gate.e_score_correction_bias")

    def mlp(value: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        pairs = zip(gate @ value, up @ value, strict=True)
        return down @ np.array(
            [4 * math.tanh(g / 4) * scalar_sigmoid(g) * 25 * math.tanh(u / 25) for g, u in pairs],
        )

    for t, token in enumerate(x):
        s = [scalar_sigmoid(logit) for logit in oracle.weight(f"{name}.gate") @ token]
        best = sorted(range(8), key=lambda e: -(s[e] + bias[e]))[:2]
        assert result.routing[3][t].tolist() == best
        z = oracle.weight(f"{name}.routed_expert_down_proj") @ token
        parts = [[oracle.shards.mxfp4(f"{name}.experts.{e}.{w}") for w in ("w1", "w3", "w2")] for e in best]
        u = sum(s[e] / sum(s[e] for e in best) * mlp(z, *part) for e, part in zip(best, parts, strict=True))
        routed = oracle.weight(f"{name}.routed_expert_up_proj") @ rms(
            u, oracle.weight(f"{name}.routed_expert_norm"), 1e-5
        )
        shared = [oracle.weight(f"{name}.shared_experts.{part}_proj") for part in ("gate", "up", "down")]
        np.testing.assert_allclose(got[t], routed + mlp(token, *shared), rtol=1e-9, atol=1e-12)


def test_mix_by_hand() -> None:
    s0, s1 = np.array([[3.0, 4.0]]), np.array([[0.0, 5.0]])  # both have mean square 12.5
    gamma = np.array([0.0, math.log(2) * math.sqrt(12.5)])  # scores 4 ln 2 and 5 ln 2: weights 1/3 and 2/3
    np.testing.assert_allclose(mix([s0], s1, gamma, 0.0), [[1.0, 14 / 3]], rtol=1e-14)
    assert mix([], s1, gamma, 0.0) is s1


def test_attention_residuals_restart_on_block_starts(directory: Path) -> None:
    """With attention ≡ 10^L and FFN ≡ 2·10^L, the running sum of a block of 2 holds its own layers and nothing else."""
    oracle = Oracle(directory)
    inputs: list[np.ndarray] = []

    def attention(x: np.ndarray, layer: int) -> np.ndarray:
        inputs.append(x)
        return np.full_like(x, 10.0**layer)

    oracle.attention = attention  # type: ignore[method-assign]
    oracle.ffn = lambda x, layer, *_: np.full_like(x, 2 * 10.0**layer)  # type: ignore[method-assign]
    result = oracle.forward(IDS)
    assert [total[3, 5] for total in result.sums] == [3, 33, 300, 3300, 30000, 330000]
    embedding = oracle.weight("model.embed_tokens")[IDS]
    assert len(result.snapshots) == 3
    np.testing.assert_array_equal(result.snapshots[0], embedding)
    assert [snapshot[0, 0] for snapshot in result.snapshots[1:]] == [33, 3300]

    def norm(h: np.ndarray, layer: int) -> np.ndarray:
        return rms(h, oracle.weight(f"model.layers.{layer}.input_layernorm"), 1e-5)

    np.testing.assert_allclose(inputs[0], norm(embedding, 0), rtol=1e-12)  # layer 0: no snapshot yet
    gamma = oracle.gamma("model.layers.2.self_attention_res")  # layer 2: the embedding and P, before P is archived
    mixed = mix([embedding], np.full_like(embedding, 33.0), gamma, 1e-5)
    np.testing.assert_allclose(inputs[2], norm(mixed, 2), rtol=1e-12)


def test_select_breaks_ties_by_lower_id_and_orders_by_score() -> None:
    ids, _, _ = select(np.array([[0.5, 0.9, 0.5, 0.7, 0.5], [0.1, 0.1, 0.1, 0.1, 0.2]]), 3)
    assert ids.tolist() == [[1, 3, 0], [4, 0, 1]]


def test_select_takes_the_engine_only_at_a_near_tie() -> None:
    scores = np.array([[0.9, 0.50004, 0.5, 0.1]] * 4)
    engine = np.array([[1, 0], [2, 0], [0, 3], [2, 3]])  # the same set; a near-tie; two sets that are no near-tie
    ids, taken, differing = select(scores, 2, engine, 1e-4)
    assert ids.tolist() == [[0, 1], [0, 2], [0, 1], [0, 1]]
    assert taken.tolist() == [False, True, False, False]
    assert differing.tolist() == [False, False, True, True]
    assert select(scores, 2, engine, 1e-5)[2].tolist() == [False, True, True, True]


@pytest.mark.parametrize("engine", [[[0, 0]], [[-1, 0]], [[0, 4]], [[0, 1, 2]]])
def test_select_refuses_malformed_sets(engine: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="engine's sets"):
        select(np.array([[0.9, 0.8, 0.5, 0.1]]), 2, np.array(engine))


def test_forward_is_finite_and_causal(oracle: Oracle) -> None:
    full = oracle.forward(IDS)
    assert full.logits.shape == (len(IDS), 300)
    assert np.isfinite(full.logits).all()
    assert sorted(full.routing) == [1, 2, 3, 4, 5]
    changed = oracle.forward([*IDS[:-1], 200])
    np.testing.assert_allclose(changed.logits[:-1], full.logits[:-1], rtol=0, atol=1e-10)
    assert np.abs(changed.logits[-1] - full.logits[-1]).max() > 1e-2
    np.testing.assert_allclose(oracle.forward(IDS[:4]).logits, full.logits[:4], rtol=0, atol=1e-10)
    early = oracle.forward([200, *IDS[1:]])
    assert np.abs(early.logits[-1] - full.logits[-1]).max() > 1e-6  # the past does reach the end


def test_forward_counts_what_it_takes_and_lists_what_differs(oracle: Oracle) -> None:
    own = oracle.forward(IDS)
    same = oracle.forward(IDS, {layer: ids[:, ::-1] for layer, ids in own.routing.items()})
    assert (same.taken, same.differing) == (0, [])
    np.testing.assert_array_equal(same.logits, own.logits)
    sets = own.routing[5].copy()
    sets[4, 1] = next(expert for expert in range(8) if expert not in sets[4])
    refused = oracle.forward(IDS, {5: sets}, gap=1e-9)
    assert (refused.taken, refused.differing) == (0, [(5, 4)])
    np.testing.assert_array_equal(refused.logits, own.logits)
    accepted = oracle.forward(IDS, {5: sets}, gap=2.0)
    assert (accepted.taken, accepted.differing) == (1, [])
    assert set(accepted.routing[5][4]) == set(sets[4])
    assert np.abs(accepted.logits[4] - own.logits[4]).max() > 1e-4
    with pytest.raises(ValueError, match="MoE"):
        oracle.forward(IDS, {0: sets})


def test_the_layout_of_the_files_does_not_matter(directory: Path, tmp_path: Path) -> None:
    """The order of tensors in a file and the sharding do not matter, the seed does."""
    write_checkpoint(tmp_path / "scattered", seed=3, contiguous=False, layers_per_shard=4)
    write_checkpoint(tmp_path / "other", seed=4)
    expected = Oracle(directory).forward(IDS).logits
    np.testing.assert_array_equal(Oracle(tmp_path / "scattered").forward(IDS).logits, expected)
    assert np.abs(Oracle(tmp_path / "other").forward(IDS).logits - expected).max() > 0.1


def test_config_layer_lists_are_one_based_and_must_partition(directory: Path, tmp_path: Path) -> None:
    assert read_config(directory / "config.json").mla_layers == {2, 4, 5}
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["linear_attn_config"]["kda_layers"] = [0, 1, 3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="partition"):
        read_config(tmp_path / "config.json")
    del config["text_config"]["attn_res_block_size"]
    config["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 4]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KeyError):
        read_config(tmp_path / "config.json")
