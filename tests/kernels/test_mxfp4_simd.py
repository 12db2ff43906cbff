"""The SIMD paths give the bits of the portable one: same integers, whatever the scales, widths and number of rows."""

import os
import subprocess
import sys

import numpy as np
import pytest

from kernels.cpu import HAS_AVX2, HAS_VNNI
from kernels.expert import ExpertShape, run_portable
from tests.kernels.numerics import same_bits

if not (HAS_VNNI or HAS_AVX2):
    pytest.skip("neither AVX-512 VNNI nor AVX2 here", allow_module_level=True)

from kernels import expert_simd

CAPS = (np.float32(4.0), np.float32(25.0))


def both(z: np.ndarray, block: np.ndarray, shape: ExpertShape) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(z))
    results = []
    for run in (run_portable, expert_simd.run):
        out = np.empty((len(z), shape.latent), np.float32)
        run(z, rows, shape.split(block), *CAPS, out)
        results.append(out)
    return results[0], results[1]


def random_expert(shape: ExpertShape, low: int, high: int, seed: int = 0) -> np.ndarray:
    """Random nibbles, scale bytes low..high."""
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 256, shape.nbytes, dtype=np.uint8)
    for scales in shape.split(block)[1::2]:
        scales[:] = rng.integers(low, high + 1, scales.shape)
    return block


# Rows shorter than a block of 128 weights, of whole blocks, with tails of one to three groups, and of 64 to 128 scale
# bytes, where the range of exponents is found by two overlapping loads.
SHAPES = [(32, 32), (64, 96), (128, 256), (160, 224), (2048, 64), (3584, 32)]


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_widths_and_rows(shape: tuple[int, int], rows: int) -> None:
    z = np.random.default_rng(1).standard_normal((rows, shape[0])).astype(np.float32)
    expert = ExpertShape(*shape)
    assert same_bits(*both(z, random_expert(expert, 118, 121), expert))


# Spans of 1, 4, 5, 8 and 24 exponents take one to seven readings, 25 and more the portable way; extremes of the byte.
RANGES = [(120, 120), (118, 121), (118, 122), (115, 122), (100, 124), (99, 124), (0, 3), (251, 254), (0, 254)]


@pytest.mark.parametrize("scales", RANGES, ids=str)
def test_scales(scales: tuple[int, int]) -> None:
    shape = ExpertShape(256, 96)
    z = np.random.default_rng(2).standard_normal((5, 256)).astype(np.float32) * np.float32(0.01)
    assert same_bits(*both(z, random_expert(shape, *scales), shape))


def test_a_nan_scale_is_nan_in_both() -> None:
    shape = ExpertShape(64, 64)
    block = random_expert(shape, 119, 121)
    shape.split(block)[3][5, 0] = 255  # w2
    z = np.ones((1, 64), np.float32)
    portable, simd = both(z, block, shape)
    assert np.isnan(portable[0]).nonzero()[0].tolist() == np.isnan(simd[0]).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, -3e38, np.inf, np.nan], ids=str)
def test_activations_at_their_limits(value: float) -> None:
    shape = ExpertShape(128, 64)
    z = np.random.default_rng(3).standard_normal((4, 128)).astype(np.float32)
    z[:, 7] = value
    z[3] = value
    portable, simd = both(z, random_expert(shape, 119, 121), shape)
    assert np.array_equal(portable, simd, equal_nan=True)


def test_saturating_activations_fill_the_accumulators() -> None:
    """Every weight ±6 at the top exponent, every activation at ±(2^22 - 1), over the released width."""
    shape = ExpertShape(3584, 32)
    z = np.ones((4, 3584), np.float32)
    z[1] = -1
    z[2, ::2] = -1
    for nibbles in (0x77, 0xFF, 0x7F):
        block = random_expert(shape, 110, 113)
        for packed in shape.split(block)[::2]:
            packed[:] = nibbles
        for scales in shape.split(block)[1::2]:
            scales[:, 1:] = 113
        assert same_bits(*both(z, block, shape))


@pytest.mark.skipif(not HAS_VNNI, reason="this is the AVX2 path already")
def test_avx2_path_gives_the_same_bits() -> None:
    """This file again in a process that compiles for a CPU without AVX-512."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert run.stdout.count(".") >= 40
