"""Standard streams that fail: a full disk, a reader that leaves, too little memory."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamer.cli import main, progress, streams
from streamer.cli.screen import Screen
from tests.streamer.cli.conftest import Done

ROOT = Path(__file__).resolve().parents[3]
GENERATE = "-p hello -n 300 -t 1 --temp 0"


def shell(model: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which $S is the command and $M the model."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "S": f"{sys.executable} -m streamer.cli.main", "M": str(model)}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, check=False)


def test_a_standard_error_that_fails_changes_nothing(model: Path, run: Callable[..., Done]) -> None:
    done = shell(model, f"$S generate $M {GENERATE} 2>/dev/full")
    expected = run("generate", model, *GENERATE.split())
    assert (done.returncode, done.stdout) == (0, expected.out)


def test_a_reader_that_leaves_ends_the_command_quietly(model: Path) -> None:
    done = shell(model, f"$S generate $M {GENERATE} -q | head -c 5; echo :${{PIPESTATUS[0]}}")
    assert done.stdout[5:] == ":141\n"
    assert done.stderr == ""


def test_a_standard_output_that_fails_is_named(model: Path) -> None:
    done = shell(model, "$S --help >/dev/full; echo $? >&2; $S inspect $M >/dev/full; echo $? >&2")
    assert done.stderr == "error: standard output cannot be written: No space left on device.\n2\n" * 2


def test_the_second_failure_is_silent() -> None:
    with contextlib.closing(io.FileIO("/dev/full", "wb")) as full:
        output = streams.Output(full, encoding="utf-8")  # type: ignore[arg-type,type-var]
        output.write("text")
        with pytest.raises(streams.OutputError, match="No space left"):
            output.flush()
        output.write("more")
        output.flush()
        notes = streams.Notes(full, encoding="utf-8", line_buffering=True)  # type: ignore[arg-type,type-var]
        assert notes.write("note\n") == 5
        notes.flush()


def test_too_little_memory_is_a_sentence(
    model: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("streamer.llm.load_model", exhausted)
    done = run("generate", model, "-p", "a")
    assert (done.code, done.out) == (2, "")
    assert f"error: {main.OUT_OF_MEMORY}\n" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("cached", [False, True])
def test_the_first_compilation_is_announced_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cached: bool
) -> None:
    monkeypatch.setattr(progress, "kernels_are_cached", lambda: cached)
    screen = Screen(0)
    screen.status("loading k3")
    loading = progress.LoadingProgress(screen)
    loading("kernels", 0, 8)
    loading("kernels", 1, 8)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["loading k3", "compiling kernels (first start only) 0/8"][: 1 if cached else 2]
