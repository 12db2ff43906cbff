"""The engine's logits against an independent float64 evaluation of the same files (tests/oracle.py).

The engine computes in float32; a random checkpoint, where nothing damps an error, is the harsh case. Where two experts
are closer than 1e-4 at the cut, the oracle takes the engine's set.
"""

from pathlib import Path

import numpy as np
import pytest

from streamer.config.bundled import BUNDLED
from tests.checkpoints import write_checkpoint
from tests.integration.runs import Run
from tests.oracle import Oracle

TOLERANCE = 1e-3  # of logits that span ±12

# No width is a multiple of sixteen that need not be; KDA head_dim 40, an MLA layer first, AttnRes blocks of three.
ODD = {
    "hidden": 76,
    "layers": 5,
    "full_attn_layers": (1, 4, 5),
    "block": 3,
    "kda_heads": 3,
    "kda_head_dim": 40,
    "conv_kernel": 3,
    "mla_heads": 3,
    "q_lora": 20,
    "kv_lora": 28,
    "nope": 12,
    "rope": 4,
    "v_dim": 10,
    "dense": 50,
    "first_dense": 2,
    "experts": 7,
    "top_k": 3,
    "shared": 1,
    "latent": 64,
    "moe_intermediate": 96,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize("overrides", [{}, ODD], ids=["default", "odd"])
def test_random_checkpoint(tmp_path: Path, overrides: dict[str, object]) -> None:
    write_checkpoint(tmp_path, seed=8, **overrides)
    ids = np.random.default_rng(4).integers(0, 299, 120).tolist()
    with Run(tmp_path) as run:
        logits, sets = run.routing(ids, 32)
    result = Oracle(tmp_path).forward(ids, sets)
    assert result.differing == []
    assert np.abs(result.logits - logits).max() < TOLERANCE


TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. What is 17 + 25? The capital of France is Paris; 3 plus 4 makes 7, and that "
    'is all there is to say. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park '
    'is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. Long was just here."'
)


def test_bundled_model_on_text() -> None:
    """200 tokens of text through k3-nano: every position within 1e-3, every expert set the oracle's own."""
    from streamer.text.tokenizer import Tokenizer

    with Run(BUNDLED) as run:
        ids = Tokenizer.from_directories([BUNDLED], run.config.vocab_size).encode(TEXT)[:200]
        assert len(ids) == 200
        logits, sets = run.routing(ids, 64)
    result = Oracle(BUNDLED).forward(ids, sets)
    assert result.differing == []
    assert result.taken <= 10
    assert np.abs(result.logits - logits).max() < TOLERANCE
