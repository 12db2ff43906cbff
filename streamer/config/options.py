"""How a checkpoint is run. No option changes a bit of the output (design §2.1), except a lossy trunk format."""

import re
from dataclasses import dataclass

from streamer.config.errors import UsageError

DEFAULT_CONTEXT_TOKENS = 32_768
TRUNK_FORMATS = ("auto", "bf16", "int8", "int4")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*|%)\s*")


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What `--memory` asks for: bytes, a share of the machine's memory, or neither (auto)."""

    text: str
    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "MemoryRequest":
        """Read '48GiB', '48GB', '75%' or 'auto'. Raises UsageError."""
        if text.strip().lower() == "auto":
            return cls("auto")
        match = _SIZE.fullmatch(text)
        if match:
            number, unit = float(match[1]), match[2].upper()
            if unit == "%" and 0 < number <= 100:
                return cls(text.strip(), share=number / 100)
            if unit in _UNITS and number > 0:
                return cls(text.strip(), nbytes=int(number * _UNITS[unit]))
        raise UsageError(f"--memory: expected a size such as 48GiB, a share such as 75%, or auto; found {text!r}.")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Memory, context and threads of one engine. `None` leaves a choice to the memory plan.

    `memory` is the budget of the whole process (see `MemoryRequest`); `trunk` the format of the weights that are not
    experts; `slots` how many experts per layer stay in memory, instead of what the budget gives; `prefetch` reads what
    later layers are predicted to want; `context_tokens` is the longest conversation (DEFAULT_CONTEXT_TOKENS, or less
    where the model ends before); `prefill_chunk` how many prompt tokens go through the layers together; `threads` of
    the kernels (physical cores).
    """

    memory: str = "auto"
    trunk: str = "auto"
    slots: int | None = None
    prefetch: bool = True
    context_tokens: int | None = None
    prefill_chunk: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        flags = {
            "--slots": self.slots,
            "--ctx-size": self.context_tokens,
            "--prefill-chunk": self.prefill_chunk,
            "--threads": self.threads,
        }
        for flag, value in flags.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and value is not None:
                raise UsageError(f"{flag}: expected a whole number, 1 or more, found {value!r}.")
        if self.trunk not in TRUNK_FORMATS:
            raise UsageError(f"--trunk: expected {', '.join(TRUNK_FORMATS)}, found {self.trunk!r}.")
        MemoryRequest.parse(self.memory)
