"""One tiny checkpoint with a tokenizer, and ways to run a command in this process."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numba
import pytest

import streamer.llm  # noqa: F401 - numba sizes its pool before a command sets thread variables
from streamer.cli import main
from tests.checkpoints import write_checkpoint, write_json
from tests.tokenizers import write_tokenizer

VOCAB = 768


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose generation never ends by itself: its eos is [PAD], which is never sampled."""
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    write_checkpoint(directory, vocab=VOCAB, context=100_000)
    write_tokenizer(directory, VOCAB)
    write_json(directory / "generation_config.json", {"eos_token_id": VOCAB - 1, "temperature": 0.7, "top_p": 0.9})
    return directory


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands size the pool of this process; give it back as it was."""
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """run(arguments…, stdin=None, terminal=False): one command on pipes, or on a terminal that is not one."""

    def run_(*arguments: object, stdin: str | bytes | None = "", terminal: bool = False) -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        out, err = (Tty(), Tty()) if terminal else (io.StringIO(), io.StringIO())
        typed = Tty(data.decode()) if terminal else io.TextIOWrapper(io.BytesIO(data), "utf-8")
        with monkeypatch.context() as patch:
            for name, stream in (("stdin", typed), ("stdout", out), ("stderr", err)):
                patch.setattr(sys, name, stream)
            code = main.execute([os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments])
        return Done(code, out.getvalue(), err.getvalue())

    return run_
