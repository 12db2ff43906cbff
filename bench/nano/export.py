"""Export a training checkpoint as a directory laid out like the released one.

`python -m bench.nano.export --checkpoint FILE --tokenizer FILE --out DIR [--card FILE]`. Trunk bfloat16,
vectors that are float32 in the release float32, routed experts MXFP4. Written beside and renamed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import mxfp4, safetensors_file
from .architecture import BASE_VOCAB, CLOSE, END_OF_MSG, OPEN, RESERVED_NAMES, SEP, Architecture
from .model import Model, initialise

PREFIX = "language_model."
FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


def tensors(model: Model) -> dict[str, Tensor]:
    """Return every tensor under its released name and dtype."""
    out = {}
    for name, value in model.state_dict().items():
        if ".experts.w" in name:
            stem, matrix = name.rsplit(".", 1)
            packed, scale = mxfp4.pack(value.float())
            for e in range(len(value)):
                out[f"{PREFIX}{stem}.{e}.{matrix}.weight_packed"] = packed[e]
                out[f"{PREFIX}{stem}.{e}.{matrix}.weight_scale"] = scale[e]
        else:
            out[PREFIX + name] = value.float() if name.endswith(FLOAT32) else value.bfloat16()
    return out


def shards(named: dict[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """Split by layer; embedding, head and the final vectors come last."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(layers + 1)]
    stem = PREFIX + "model.layers."
    for name, tensor in named.items():
        index = int(name[len(stem) :].split(".", 1)[0]) if name.startswith(stem) else layers
        parts[index][name] = tensor
    return parts


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json; the three channel markers survive `skip_special_tokens`."""
    added = {}
    for offset, name in RESERVED_NAMES.items():
        token = BASE_VOCAB + offset
        added[str(token)] = {"content": name, "special": token not in (OPEN, CLOSE, SEP)}
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": Architecture().context,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def export(model: Model, tokenizer: Path, out: Path, card: Path | None = None) -> int:
    """Write the whole directory and return its size in bytes; replaces `out`."""
    temporary = out.with_name(out.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    parts = shards(tensors(model), model.a.layers)
    payload_bytes, weight_map = 0, {}
    for index, part in enumerate(parts, 1):
        name = f"model-{index:05d}-of-{len(parts):06d}.safetensors"
        payload_bytes += safetensors_file.write(temporary / name, part)
        weight_map |= dict.fromkeys(sorted(part), name)
    write_json(
        temporary / "model.safetensors.index.json",
        {"metadata": {"total_size": payload_bytes}, "weight_map": weight_map},
    )
    write_json(temporary / "config.json", model.a.config())
    write_json(
        temporary / "generation_config.json",
        {"eos_token_id": END_OF_MSG, "do_sample": True, "temperature": 0.6, "top_p": 0.95},
    )
    write_json(temporary / "tokenizer_config.json", tokenizer_config())
    shutil.copyfile(tokenizer, temporary / "tiktoken.model")
    if card is not None:
        shutil.copyfile(card, temporary / "README.md")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.replace(old)
    temporary.replace(out)
    shutil.rmtree(old, ignore_errors=True)
    return sum(path.stat().st_size for path in out.iterdir())


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="checkpoint.pt; without it, random weights")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tiktoken.model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--card", type=Path, help="model card, copied as README.md")
    parser.add_argument("--seed", type=int, default=3, help="seed of random weights")
    args = parser.parse_args()
    model, step = Model(Architecture()), 0
    if args.checkpoint is None:
        initialise(model, args.seed)
    else:
        saved = torch.load(args.checkpoint, mmap=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    print(json.dumps({"step": step, "bytes": export(model, args.tokenizer, args.out, args.card)}))


if __name__ == "__main__":
    main()
