"""Reading and writing one safetensors file: u64 header length, JSON header, data; nothing else.

Tensors are laid out F32, then BF16, then U8, each sorted by name, without gaps, as in the released shards:
that puts the six tensors of an expert back to back.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
ORDER = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write `tensors` and return their payload in bytes; a dtype outside DTYPES raises KeyError."""
    header, at = {}, 0
    names = sorted(tensors, key=lambda name: (ORDER[tensors[name].dtype], name))
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(tensors[name].detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return at


def read(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a file, in its stored dtype."""
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        data = torch.frombuffer(raw[start:end], dtype=torch.uint8)
        tensors[name] = data.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
