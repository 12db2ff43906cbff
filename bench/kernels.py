"""Speed of every kernel at the widths of the released model, beside the read bandwidth measured in between.

    python -m bench.kernels [--quick] [--span-mb N] [--rounds N] [--threads N]

Prints a table, then one JSON line. Weights rotate through a span far larger than the last cache, so that each call
reads them from memory as a forward pass would.
"""

import argparse

import numba
import numpy as np

from bench.common import PROBE, Case, alternate, commit, host, last_cache_bytes, print_json, read_probe
from kernels.attn_res import mix
from kernels.delta_rule import advance
from kernels.dense import linear
from kernels.expert import ExpertShape, expert_mlp
from kernels.mla import attention
from kernels.router import route

HIDDEN, HEADS, HEAD_DIM, SNAPSHOTS = 7168, 96, 128, 8
NOPE, ROPE, VALUE, LATENT, KEYS = 128, 64, 128, 512, 4096
EXPERT = ExpertShape(3584, 3072)
N_EXPERTS, TOP_K = 896, 16
CAPS = (4.0, 25.0)
OFFSETS = (16, 40, 48)  # where a direct read leaves an expert, modulo 64
_RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


def fill(arena: np.ndarray, pattern: np.ndarray) -> None:
    """Repeat bytes over the arena. The pattern is random, larger than a page and no divisor of a block."""
    for first in range(0, arena.size, pattern.size):
        part = arena[first : first + pattern.size]
        part[:] = pattern[: part.size]


def floats_pattern() -> np.ndarray:
    """bf16 numbers of a weight's size; two of them are also a float32 of that size."""
    return ((normal(3_999_971) * np.float32(0.02)).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def blocks(arena: np.ndarray, nbytes: int, dtype: type, *shape: int) -> list[np.ndarray]:
    """Consecutive arrays of one shape over the arena."""
    stride = (nbytes + 63) // 64 * 64
    return [
        arena[at : at + nbytes].view(dtype).reshape(shape) for at in range(0, arena.size - nbytes + 1, stride)
    ] or _too_small(nbytes)


def _too_small(nbytes: int) -> list[np.ndarray]:
    raise SystemExit(f"--span-mb is too small: one block is {nbytes / 1e6:.0f} MB")


def dense_cases(arena: np.ndarray) -> list[Case]:
    """bf16 trunk layers."""
    cases = []
    for n in (7168, 12288):
        weights = blocks(arena, 2 * n * HIDDEN, np.uint16, n, HIDDEN)
        for rows in (1, 4, 64):
            x = normal(rows, HIDDEN)

            def run(i: int, x: np.ndarray = x, weights: list[np.ndarray] = weights) -> None:
                linear(x, weights[i % len(weights)])

            cases.append(Case(f"dense bf16 {n}x{HIDDEN} M={rows}", weights[0].nbytes, run, "weights"))
    return cases


def expert_cases(arena: np.ndarray) -> list[Case]:
    """One fused routed expert, where a direct read would have put it."""
    stride = (EXPERT.nbytes + 127) // 64 * 64
    count = arena.size // stride
    experts = [arena[i * stride + OFFSETS[i % 3] :][: EXPERT.nbytes] for i in range(count)] or _too_small(stride)
    for block in experts:
        for scales in EXPERT.split(block)[1::2]:
            scales[:] = 121
    cases = []
    for rows in (1, 4, 16):
        z, ids = normal(rows, EXPERT.latent), np.arange(rows)

        def run(i: int, z: np.ndarray = z, ids: np.ndarray = ids) -> None:
            expert_mlp(z, ids, experts[i % count], EXPERT, *CAPS)

        cases.append(
            Case(f"expert MXFP4 {EXPERT.latent}/{EXPERT.intermediate} M={rows}", EXPERT.nbytes, run, "weights")
        )
    return cases


def kda_cases(arena: np.ndarray) -> list[Case]:
    """One decode step of one layer: the committed token enters the state, the new one reads it."""
    shape = (1, HEADS, HEAD_DIM)
    states = blocks(arena, 4 * HEADS * HEAD_DIM**2, np.float32, HEADS, HEAD_DIM, HEAD_DIM)
    q, k, v = (normal(*shape) * np.float32(HEAD_DIM**-0.5) for _ in "qkv")
    alpha, beta = np.full(shape, 0.9, np.float32), np.full((1, HEADS), 0.5, np.float32)
    out, keep_none = np.empty(shape, np.float32), np.empty((0, 1, 1), np.float32)

    def step(i: int) -> None:
        advance(states[i % len(states)], k, v, alpha, beta, q, k, v, alpha, beta, out, keep_none)

    name = f"{HEADS}x{HEAD_DIM} T=1"
    return [
        Case(f"kda decode {name}", 2 * states[0].nbytes, step, "state, read and written"),
    ]


def other_cases(arena: np.ndarray) -> list[Case]:
    """Latent attention, the Attention Residuals mix, the router."""
    half = arena.size // 2
    caches = blocks(arena[:half], 4 * KEYS * (LATENT + ROPE), np.float32, KEYS, LATENT + ROPE)
    kv_bs = blocks(arena[half:], 2 * HEADS * (NOPE + VALUE) * LATENT, np.uint16, HEADS, NOPE + VALUE, LATENT)
    q, out = normal(1, HEADS, NOPE + ROPE), np.empty((1, HEADS, VALUE), np.float32)
    scale, gamma = np.float32((NOPE + ROPE) ** -0.5), normal(HIDDEN) / np.float32(HIDDEN)

    def attend(i: int) -> None:
        attention(q, kv_bs[i % len(kv_bs)], caches[i % len(caches)], KEYS - 1, scale, out)

    nbytes = caches[0].nbytes + kv_bs[0].nbytes
    cases = [Case(f"mla {HEADS} heads, {KEYS} keys M=1", nbytes, attend, "latents and kv_b, once")]
    for rows in (1, 64):
        sources = blocks(arena, 4 * (SNAPSHOTS + 1) * rows * HIDDEN, np.float32, SNAPSHOTS + 1, rows, HIDDEN)
        logits, bias = normal(rows, N_EXPERTS), normal(N_EXPERTS) * np.float32(0.1)

        def mixing(i: int, sources: list[np.ndarray] = sources) -> None:
            mix(sources[i % len(sources)], SNAPSHOTS + 1, gamma, 1e-5)

        def routing(i: int, logits: np.ndarray = logits, bias: np.ndarray = bias) -> None:
            route(logits, bias, TOP_K, 1.0)

        cases.append(Case(f"mix {SNAPSHOTS + 1}x{HIDDEN} M={rows}", sources[0].nbytes, mixing, "sources, once"))
        cases.append(Case(f"router {N_EXPERTS} top {TOP_K} M={rows}", logits.nbytes, routing, "logits, in cache"))
    return cases


def measure(span_bytes: int, rounds: int, sample_s: float) -> list[dict[str, object]]:
    """Rows of the table; a family shares the arena with the probe that it is compared to."""
    arena = np.empty(span_bytes, np.uint8)
    rows: list[dict[str, object]] = []
    floats, random_bytes = floats_pattern(), _RNG.integers(0, 256, 7_999_943, dtype=np.uint8)
    families = ((dense_cases, floats), (kda_cases, floats), (other_cases, floats), (expert_cases, random_bytes))
    print(f"{'kernel':34} {'us/call':>10} {'GB/s':>7} {'% of probe':>10}  bytes counted")
    for make, pattern in families:
        fill(arena, pattern)
        probe, *cases = family = [read_probe(arena), *make(arena)]
        alternate(family, rounds, sample_s)
        for case in family:
            share = case.gb_s / probe.gb_s
            name = f"{PROBE} ({make.__name__.removesuffix('_cases')})" if case is probe else case.name
            print(f"{name:34} {case.call_s * 1e6:10.1f} {case.gb_s:7.2f} {share:10.0%}  {case.note}", flush=True)
            row = {"name": name, "us": case.call_s * 1e6, "gb_s": case.gb_s, "share": share, "bytes": case.nbytes}
            rows.append({**row, "samples_us": [round(s * 1e6, 2) for s in case.seconds]})
        del cases
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small span, few samples: proves that it runs, no more")
    parser.add_argument("--span-mb", type=int, help="bytes to rotate through, in 1e6 (1600; --quick 400)")
    parser.add_argument("--rounds", type=int, help="samples of each case (9; --quick 3)")
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    span_mb = arguments.span_mb or (400 if arguments.quick else 1600)
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    sample_s = 0.02 if arguments.quick else 0.25
    if (last_cache_bytes() or 0) * 4 > span_mb * 10**6:
        print(f"warning: {span_mb} MB is less than four times the last cache; rates will flatter")
    rows = measure(span_mb * 10**6, rounds, sample_s)
    config = {"span_mb": span_mb, "rounds": rounds, "sample_s": sample_s, "quick": arguments.quick}
    print_json({"bench": "kernels", "commit": commit(), "host": host(), "config": config, "rows": rows})


if __name__ == "__main__":
    main()
