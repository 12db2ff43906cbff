"""What the trunk does to weights between file and kernel: bf16 vectors become float32."""

import numpy as np

from kernels.reference import dense as reference
from streamer.experts.trunk_layers import widen


def test_every_bf16_becomes_its_float32() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs among them
        np.testing.assert_array_equal(np.float64(widen(bits)), reference.widen(bits))
    assert np.signbit(widen(np.array([0x8000], np.uint16)))[0]
