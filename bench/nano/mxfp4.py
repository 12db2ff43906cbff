"""MXFP4 (OCP microscaling E2M1, one E8M0 scale per 32 inputs): fake quantisation, packing, unpacking.

Scale rule: 2^(floor(log2(absmax)) - 2), the OCP rule, so that training and export round identically.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def exponents(w: Tensor) -> Tensor:
    """Return the scale exponent of each group of a float32 `w` [..., n]: int32 [..., n/32], in [-126, 125]."""
    absmax = w.unflatten(-1, (-1, GROUP)).abs().amax(-1)
    # Reading the exponent bits is exact where floor(log2) may be one off beside a power of two.
    return ((absmax.contiguous().view(torch.int32) >> 23) - 127 - 2).clamp(-126, 125)


def magnitudes(x: Tensor) -> Tensor:
    """Round |x| (already divided by its scale, so below 8) to the nearest of LEVELS, ties to even code."""
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    return ((x / step).round() * step).clamp(max=6.0)


def fake_quantise(w: Tensor) -> Tensor:
    """Return what packing and unpacking float32 `w` [..., n] would give, differentiable as the identity."""
    groups = w.unflatten(-1, (-1, GROUP))
    # Rebuilding 2^e from exponent bits keeps the scale an exact power of two.
    scale = ((exponents(w.detach()) + 127) << 23).view(torch.float32)[..., None]
    rounded = magnitudes(groups.detach().abs() / scale) * scale * groups.detach().sign()
    return (groups + (rounded - groups.detach())).flatten(-2)


def pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 `w` [..., n] to uint8 nibbles [..., n/2] (even input low) and scales [..., n/32]."""
    exponent = exponents(w)
    scaled = w.unflatten(-1, (-1, GROUP)) * torch.exp2(-exponent.double())[..., None].float()
    levels = torch.tensor(LEVELS)
    code = torch.searchsorted(levels, magnitudes(scaled.abs()).contiguous()).to(torch.uint8)
    code = (code | (torch.signbit(scaled).to(torch.uint8) << 3)).flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Invert `pack`: uint8 [..., n/2] and [..., n/32] to exact values [..., n]."""
    table = torch.tensor(LEVELS + tuple(-level for level in LEVELS), dtype=dtype)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = table[codes.long()].unflatten(-1, (-1, GROUP))
    return (values * torch.exp2(scale.to(dtype) - 127)[..., None]).flatten(-2)
