"""Train k3-nano: `python -m bench.nano.train --corpus DIR --work DIR`.

Reproducible from seed and step count (the arithmetic of a compiled kernel may differ between machines).
Checkpoints are atomic; `--resume` continues the newest one.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from . import batches, corpus, dialogue, facts, fast_ops, talk, tokenizer
from .architecture import Architecture
from .model import LatentMoE, Model, initialise

LEARNING_RATE = 3e-3
WARM_UP = 40
DECAY_FROM = 0.4  # constant up to this fraction of the run, then linear to LAST_RATE
LAST_RATE = 0.02
WEIGHT_DECAY = 0.05
BIAS_RATE = 0.005
SHARED_DROP = 0.25
SNIPPETS = 20_000


@dataclass(slots=True)
class Data:
    """Tokenizer, training batches and held-out text."""

    encoding: object
    batches: batches.Batches
    held_out: Tensor


def prepare(root: Path, work: Path, seed: int) -> Data:
    """Read the corpus, train the tokenizer unless `work` has one, and set up the batches."""
    text = corpus.load(root)
    path = work / "tiktoken.model"
    if not path.exists():
        tokenizer.save(tokenizer.train([(text, 1), *protocol_texts()]), path)
    encoding = tokenizer.load(path)
    train_ids, held_out = corpus.split(text, encoding)
    renderer = dialogue.Renderer(encoding)
    seen = encoding.decode(train_ids.tolist())  # user messages must not quote the held-out text either
    source = batches.Batches(train_ids, batches.snippets(seen, SNIPPETS, seed), renderer, seed)
    return Data(encoding, source, torch.from_numpy(held_out))


def protocol_texts() -> list[tuple[str, int]]:
    """Return chat strings with weights that make protocol words, then common answers, single tokens."""
    words = (
        "message",
        "think",
        "response",
        " role",
        " type",
        "user",
        "assistant",
        "system",
        '="',
        "thinking",
        "low",
        "medium",
        "high",
        "max",
        "-effort",
        " +",
        "=",
        "+",
        ",",
        " carry",
        " =",
    )
    texts = [(word, 20_000) for word in words] + [(dialogue.EFFORT_TEXT, 3_000)]
    for asks, think, answer in (*facts.FACTS, *talk.SELF, *talk.TALK):
        texts += [(ask, 10) for ask in asks] + [(think, 100), (answer, 150)]
    texts += [(ask.format(a="", b=""), 150) for ask in dialogue.SUM_PROMPTS]
    texts += [(part, 1_000) for part in (*talk.FALLBACK, *talk.TOO_LARGE, *talk.ONLY_ADD)]
    return texts + [(text, 100) for text in (*talk.SYSTEMS, *talk.NAMES)]


def rate(step: int, steps: int) -> float:
    """Return the learning rate of `step` as a fraction of its maximum."""
    decay = (steps - step) / (steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP, LAST_RATE + (1 - LAST_RATE) * decay)


def optimiser(model: Model) -> torch.optim.AdamW:
    """Return AdamW; weight decay on matrices other than the embedding and the AttnRes projections."""
    decayed, plain = [], []
    for name, p in model.named_parameters():
        vector = p.dim() < 2 or "embed" in name or "res_proj" in name or "conv1d" in name
        (plain if vector else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.97), eps=1e-9, fused=True)


def moe_layers(model: Model) -> list[LatentMoE]:
    """Return the MoE blocks in layer order."""
    return [m for m in model.modules() if isinstance(m, LatentMoE)]


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], fraction: float
) -> tuple[Tensor, float]:
    """Take one step at `fraction` of the maximal rate; return per-token losses and the gradient norm."""
    ids, targets, mask = batch
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * fraction
    for moe in moe_layers(model):
        moe.shared_drop = SHARED_DROP * max(fraction, 0.4)
    losses = functional.cross_entropy(model(ids, fast_ops, mask).float(), targets[mask], reduction="none")
    losses.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for moe in moe_layers(model):
        load = moe.gate.load.float()
        # Loss-free balancing: only the selection moves, never the mixing weights.
        moe.gate.e_score_correction_bias += BIAS_RATE * max(fraction, 0.1) * torch.sign(load.mean() - load)
    return losses.detach(), float(norm)


@torch.no_grad()
def quick_scores(model: Model, data: Data, sums: int = 24, rows: int = 24) -> dict[str, float]:
    """Return held-out text loss and teacher-forced exact rates of a few held-out sums."""
    model.eval()
    ids = data.held_out[: rows * batches.SHORT + 1]
    x, y = ids[:-1].view(rows, -1), ids[1:].view(rows, -1)
    scores = {"text": float(functional.cross_entropy(model(x, fast_ops).float().flatten(0, 1), y.flatten()))}
    pairs = dialogue.held_out_pairs()
    pairs = pairs[:: len(pairs) // sums][:sums]
    renderer = data.batches.renderer
    for name, thinking in (("think", True), ("direct", False)):
        right, rendered = 0, []
        for a, b in pairs:
            turn = dialogue.sum_turn(a, b, "What is {a} + {b}?")
            rendered.append((renderer.prompt(turn.user, thinking), renderer.completion(turn, thinking)))
        length = batches.SHORT
        x = torch.zeros(len(rendered), length, dtype=torch.long)
        for row, (prompt, answer) in enumerate(rendered):
            x[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        best = model(x, fast_ops).argmax(-1)
        for row, (prompt, answer) in enumerate(rendered):
            got = best[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            right += got.tolist() == answer
        scores[name] = right / len(rendered)
    model.train()
    return scores


def save_checkpoint(path: Path, model: Model, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Write everything a resumed run needs; data and dropout depend on seed and step only."""
    temporary = path.with_suffix(".partial")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "steps": steps},
        temporary,
    )
    temporary.replace(path)


def run(args: argparse.Namespace) -> None:
    """Train to `args.steps`, logging one JSON line per report."""
    args.work.mkdir(parents=True, exist_ok=True)
    data = prepare(args.corpus, args.work, args.seed)
    model = Model(Architecture())
    initialise(model, args.seed)
    optimizer, start = optimiser(model), 0
    checkpoint = args.work / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    began, window = time.time(), [0.0] * 4
    log = (args.work / "log.jsonl").open("a")
    for step in range(start, args.steps):
        torch.manual_seed(args.seed * 1_000_003 + step)
        batch = data.batches.step(step)
        text = torch.zeros_like(batch[2])
        text[:] = batch[2].all(1, keepdim=True)
        losses, norm = train_step(model, optimizer, batch, rate(step, args.steps))
        is_text = text[batch[2]]
        for index, part in enumerate((losses[is_text], losses[~is_text])):
            window[2 * index] += float(part.sum())
            window[2 * index + 1] += part.numel()
        if (step + 1) % args.report == 0:
            report = {
                "step": step + 1,
                "s": round(time.time() - began, 1),
                "text": window[0] / window[1],
                "chat": window[2] / window[3],
                "norm": round(norm, 3),
            }
            if (step + 1) % args.score == 0:
                report |= {f"held_out_{k}": v for k, v in quick_scores(model, data).items()}
                report["max_load"] = float(
                    max(m.gate.load.max() / m.gate.load.float().mean() for m in moe_layers(model))
                )
            window = [0.0] * 4
            print(json.dumps(report), file=log, flush=True)
        if (step + 1) % args.checkpoint == 0 or step + 1 == args.steps:
            save_checkpoint(checkpoint, model, optimizer, step + 1, args.steps)


def check() -> None:
    """Print how far training arithmetic is from the definitions, on random weights."""
    model = Model(Architecture())
    initialise(model, 1)
    model.eval()
    ids = torch.randint(0, model.a.vocab, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for moe in moe_layers(model):
            for w in moe.experts.parameters():
                w.copy_(fast_ops.fake_quantise(w).float())
        exact, fast = model(ids), model(ids, fast_ops).float()
    error = float((exact - fast).abs().max())
    print(json.dumps({"max_difference": error, "logit_rms": float(exact.square().mean().sqrt())}))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="unpacked r-cran-janeaustenr package")
    parser.add_argument("--work", type=Path, help="directory for tokenizer, checkpoint and log")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=int, default=20)
    parser.add_argument("--score", type=int, default=200)
    parser.add_argument("--checkpoint", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare the two arithmetics and exit")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    check() if args.check else run(args)


if __name__ == "__main__":
    main()
