"""How a checkpoint is run. None of these options changes a bit of the output (design §2.1)."""

from dataclasses import dataclass

from streamer.config.errors import UsageError

DEFAULT_CONTEXT_TOKENS = 32_768
DEFAULT_PREFILL_CHUNK = 128


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Memory, context and threads of one engine.

    `slots` is the number of experts per layer kept in memory (None: as many as fit); `context_tokens` the longest
    conversation (None: DEFAULT_CONTEXT_TOKENS, or less where the model ends before); `prefill_chunk` how many prompt
    tokens go through the layers together; `threads` of the kernels (None: physical cores).
    """

    slots: int | None = None
    context_tokens: int | None = None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    threads: int | None = None

    def __post_init__(self) -> None:
        flags = {
            "--slots": self.slots,
            "--ctx-size": self.context_tokens,
            "--prefill-chunk": self.prefill_chunk,
            "--threads": self.threads,
        }
        for flag, value in flags.items():
            optional = flag != "--prefill-chunk"
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (optional and value is None):
                raise UsageError(f"{flag}: expected a whole number, 1 or more, found {value!r}.")
