"""Compile every kernel, or load it from the cache, before the first token asks for it.

Tiny arrays of exactly the types that the forward pass uses: numba compiles by type. A call that the forward makes with
another type would compile in the middle of a token; tests/kernels/test_warmup.py holds this list against the kernels.
"""

from collections.abc import Callable

import numpy as np

from kernels import activation, attn_res, delta_rule, dense, expert, kda, mla, norm, quantised, router

_ROWS, _HEADS, _WIDTH = 2, 2, 32


def warm_up(progress: Callable[[int, int], None] | None = None) -> None:
    """Run every kernel once; `progress(done, total)` is called before each and at the end."""
    calls = (_activations, _dense, _norm_and_mix, _router, _expert, _kda_inputs, _delta_rule, _mla)
    for done, call in enumerate(calls):
        if progress:
            progress(done, len(calls))
        call()
    if progress:
        progress(len(calls), len(calls))


def _floats(*shape: int) -> np.ndarray:
    return np.full(shape, 0.5, np.float32)


def _bf16(*shape: int) -> np.ndarray:
    return np.full(shape, 0x3F00, np.uint16)  # 0.5


def _activations() -> None:
    x, cap = _floats(_ROWS, _WIDTH), np.float32(4.0)
    activation.situ_glu(x, x, cap, cap, np.empty_like(x))
    activation.gate_by_sigmoid(x, _floats(_ROWS, _WIDTH))
    activation.exp_vector(_floats(_HEADS))
    activation.all_finite(x)


def _dense() -> None:
    x, bits = _floats(_ROWS, _WIDTH), _bf16(5, _WIDTH)
    dense.linear(x, bits)
    for form in quantised.FORMATS:
        dense.linear(x, quantised.quantise(bits, form))


def _norm_and_mix() -> None:
    norm.rms_norm(_floats(_ROWS, _WIDTH), _floats(_WIDTH), 1e-5)
    attn_res.mix(_floats(2, _ROWS, _WIDTH), 2, _floats(_WIDTH), 1e-5)


def _router() -> None:
    router.route(_floats(_ROWS, 4), _floats(4), 2, 1.0)


def _expert() -> None:
    shape = expert.ExpertShape(latent=_WIDTH, intermediate=_WIDTH)
    block = np.full(shape.nbytes, 120, np.uint8)
    expert.expert_mlp(_floats(_ROWS, _WIDTH), np.array([0], np.int64), block, shape, 4.0, 25.0)
    expert.combine(_floats(_ROWS, 2, _WIDTH), _floats(_ROWS, 2), np.empty((_ROWS, _WIDTH), np.float32))


def _kda_inputs() -> None:
    u = _floats(_ROWS, _WIDTH)
    kda.short_conv(_floats(3 + _ROWS, _WIDTH), _floats(_WIDTH, 4), np.empty_like(u))
    x = _floats(_ROWS, _HEADS, _WIDTH)
    kda.normalise_heads(x, np.float32(1.0))
    kda.decay(x, _floats(_HEADS), _floats(_HEADS, _WIDTH), np.float32(-5.0), np.empty_like(x))
    kda.sigmoid_rows(_floats(_ROWS, _HEADS), np.empty((_ROWS, _HEADS), np.float32))
    kda.norm_and_gate(x, _floats(_WIDTH), np.float32(1e-5), _floats(_ROWS, _HEADS, _WIDTH))


def _delta_rule() -> None:
    x, beta = _floats(_ROWS, _HEADS, _WIDTH), _floats(_ROWS, _HEADS)
    state = np.zeros((_HEADS, _WIDTH, _WIDTH), np.float32)
    delta_rule.advance(state, x, x, x, beta, x, x, x, x, beta, np.empty_like(x), np.empty((0, 1, 1), np.float32))


def _mla() -> None:
    q, cache = _floats(_ROWS, _HEADS, 16 + 8), _floats(4, _WIDTH + 8)
    out = np.empty((_ROWS, _HEADS, 16), np.float32)
    mla.attention(q, _bf16(_HEADS, 16 + 16, _WIDTH), cache, 1, np.float32(0.2), out)
