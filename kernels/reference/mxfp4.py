"""Definition of the MXFP4 decode (k3-spec §2.4). float64 holds every MXFP4 value exactly."""

import numpy as np

GROUP = 32  # weights of a row that share a scale byte
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SCALE_BIAS = 127
SCALE_NAN = 255


def decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`packed` uint8 [N, K/2] and `scales` uint8 [N, K/32] as float64 [N, K]; a scale byte of 255 gives NaN.

    Byte j of a row holds element 2j in its low nibble and element 2j + 1 in its high nibble.
    """
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2] = E2M1[packed & 15]
    values[:, 1::2] = E2M1[packed >> 4]
    multipliers = np.where(scales == SCALE_NAN, np.nan, np.exp2(scales.astype(np.float64) - SCALE_BIAS))
    return values * np.repeat(multipliers, GROUP, axis=1)
