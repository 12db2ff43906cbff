"""From a checkpoint directory to a running engine: preflight, memory plan, trunk, experts.

Nothing is read from a weight before the whole checkpoint has passed its preflight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.warmup import warm_up
from storage.checkpoint import Checkpoint
from storage.reader import ExpertReader
from streamer.config.errors import UsageError
from streamer.config.load import cache_directory, load_model_config
from streamer.config.model import ModelConfig
from streamer.config.options import DEFAULT_CONTEXT_TOKENS, EngineOptions
from streamer.config.tensors import VISION_PREFIXES, expert_tensors, trunk_tensors
from streamer.engine.engine import Engine
from streamer.engine.limits import memory_limits
from streamer.engine.memory import MemoryPlan, plan_memory
from streamer.engine.threads import start_threads
from streamer.experts.factory import open_experts
from streamer.experts.trunk import Trunk, open_trunk
from streamer.model.forward import Model

READ_THREADS = 8
LOOKAHEAD = 1  # layers whose routing is predicted while one is computed

Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(slots=True)
class LoadedModel:
    """An engine and what it stands on. `close` gives everything back."""

    engine: Engine
    checkpoint: Checkpoint
    trunk: Trunk
    reader: ExpertReader
    memory: MemoryPlan
    context_tokens: int

    def close(self) -> None:
        """Stop the readers, free the arena, close the files. Idempotent."""
        self.engine.closed = True
        self.engine.model.experts.close()
        self.trunk.close()
        self.reader.close()
        self.checkpoint.close()


def load_model(directories: Sequence[Path], options: EngineOptions, progress: Progress | None = None) -> LoadedModel:
    """Open, check and load a checkpoint. Raises ConfigError, StorageError or UsageError, each a sentence."""
    config = load_model_config(directories)
    context_tokens = _context(config, options)
    experts = expert_tensors(config)
    checkpoint = Checkpoint.open(directories, trunk_tensors(config), experts, VISION_PREFIXES)
    reader: ExpertReader | None = None
    trunk: Trunk | None = None
    try:
        memory = plan_memory(config, experts.expert_bytes, context_tokens, options, memory_limits())
        start_threads(options.threads)
        warm_up(_named(progress, "kernels"))
        reader = ExpertReader(READ_THREADS, files=checkpoint.files)
        trunk = open_trunk(checkpoint, config, memory.placement, reader, cache_directory(), progress)
        source = open_experts(
            checkpoint.expert_span,
            config.moe.n_experts,
            experts.expert_bytes,
            memory.slots,
            reader,
            lookahead=LOOKAHEAD if options.prefetch else 0,
            progress=_named(progress, "experts"),
        )
    except BaseException:
        if trunk is not None:
            trunk.close()
        if reader is not None:
            reader.close()
        checkpoint.close()
        raise
    engine = Engine(Model(config, trunk, source), memory.prefill_chunk)
    return LoadedModel(engine, checkpoint, trunk, reader, memory, context_tokens)


def _context(config: ModelConfig, options: EngineOptions) -> int:
    limit = config.max_position_embeddings
    if options.context_tokens is not None and options.context_tokens > limit:
        raise UsageError(f"--ctx-size {options.context_tokens}: this model was made for at most {limit:,} tokens.")
    return options.context_tokens or min(limit, DEFAULT_CONTEXT_TOKENS)


def _named(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)
