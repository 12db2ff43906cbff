"""Where a model is: directories as given, or the bundled k3-nano."""

from collections.abc import Sequence
from pathlib import Path

BUNDLED = Path(__file__).parent.parent / "assets" / "k3-nano"


def model_directory(model: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Directories of a model: one, several (first wins by file name), or the bundled one for None."""
    if model is None:
        return [BUNDLED]
    if isinstance(model, str | Path):
        return [Path(model)]
    return [Path(directory) for directory in model]
