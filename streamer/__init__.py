"""moe-streamer: the complete Kimi K3 checkpoint on one workstation.

The public API is here and loads on first use: `import streamer` stays fast, and a run that needs no torch imports none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.config.options import EngineOptions as EngineOptions
    from streamer.engine.sampling import SamplingParams as SamplingParams
    from streamer.llm import LLM as LLM
    from streamer.outputs import CompletionOutput as CompletionOutput
    from streamer.outputs import RequestOutput as RequestOutput
    from streamer.session import Session as Session

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "streamer.llm",
    "SamplingParams": "streamer.engine.sampling",
    "EngineOptions": "streamer.config.options",
    "RequestOutput": "streamer.outputs",
    "CompletionOutput": "streamer.outputs",
    "Session": "streamer.session",
}
__all__ = ["LLM", "CompletionOutput", "EngineOptions", "RequestOutput", "SamplingParams", "Session", "__version__"]


def _check_neighbours() -> None:
    """`kernels` is also the name of a package on the index; whichever was installed last owns the files."""
    for name in ("cache_policy", "kernels", "storage"):
        module = importlib.import_module(name)
        if getattr(module, "MOE_STREAMER_PACKAGE", None) != name:
            raise ImportError(
                f"moe-streamer needs its own package {name!r}, but Python found {getattr(module, '__file__', module)}, "
                "which another distribution installed under the same name. Install moe-streamer in an environment of "
                "its own: python3 -m venv .venv && .venv/bin/pip install moe-streamer"
            )


_check_neighbours()


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'streamer' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


from streamer.config.load import prepare_kernels as _prepare_kernels  # noqa: E402 - after the check

_prepare_kernels()
