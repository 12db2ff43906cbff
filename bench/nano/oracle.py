"""An exported directory as a torch model: `logits(load_exported(DIR), ids)`.

Independent of the engine: own reader, own unpacking, arithmetic by definition (`reference_ops`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from . import mxfp4, safetensors_file
from .architecture import Architecture
from .export import PREFIX
from .model import Model


def load_exported(directory: Path | str, dtype: torch.dtype = torch.float32) -> Model:
    """Return the model in `dtype` with experts dequantised (exactly); names must match one to one."""
    directory = Path(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        stored |= safetensors_file.read(directory / shard)
    model = Model(Architecture.from_config(json.loads((directory / "config.json").read_text())))
    state = {}
    for name, like in model.state_dict().items():
        if ".experts.w" in name:
            stem, matrix = (PREFIX + name).rsplit(".", 1)
            names = [f"{stem}.{e}.{matrix}.weight_" for e in range(len(like))]
            packed, scale = (torch.stack([stored.pop(n + part) for n in names]) for part in ("packed", "scale"))
            state[name] = mxfp4.unpack(packed, scale, dtype)
        else:
            state[name] = stored.pop(PREFIX + name).to(dtype)
    if stored:
        raise ValueError(f"{directory}: {len(stored)} tensors not in the model, such as {min(stored)}")
    model.to(dtype).load_state_dict(state)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def logits(model: Model, ids: list[int]) -> Tensor:
    """Return logits [T, V] of one sequence from position 0, in the model's dtype."""
    return model(torch.tensor([ids]))[0]
