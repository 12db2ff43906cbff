"""A small random checkpoint of every mechanism, and ways to run it."""

from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, both attentions, three AttnRes blocks, eight experts top-2; weights differ from everything else."""
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, seed=3)
    return directory
