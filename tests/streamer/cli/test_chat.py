"""`streamer chat`: on a pipe, on a terminal, interrupted, refused, and with every command."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage.errors import StorageError
from streamer import LLM, SamplingParams
from streamer.apps import chat as apps_chat
from streamer.cli import chat_input, screen
from streamer.cli.answer_view import AnswerView
from streamer.cli.chat_input import PipeReader, PlainReader, ToolkitReader, open_reader, read_message
from streamer.model.forward import Model
from streamer.session import Answer
from streamer.text.parsed import Delta
from tests.streamer.cli.conftest import Done, Tty

Run = Callable[..., Done]
SHORT = ("--max-think-tokens", 3, "-n", 24, "--seed", 7, "-t", 1)


def answers(model: Path, *messages: str) -> list[str]:
    """Contents of the answers to `messages`, from the Python API."""
    contents = []
    with LLM(model) as llm:
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=24)
        session = llm.session(params=params, max_think_tokens=3)
        for message in messages:
            *_, last = session.send(message)
            assert isinstance(last, Answer)
            contents.append(last.message.content)
    return contents


def test_each_line_of_a_pipe_is_a_message(run: Run, model: Path) -> None:
    done = run("chat", model, *SHORT, stdin="hello\n\nworld\n")
    assert done.code == 0
    assert done.out == "".join(text.removesuffix("\n") + "\n" for text in answers(model, "hello", "world"))
    assert "effort low" in done.err
    assert "stopped at --max-tokens 24" in done.err
    assert "\x1b" not in done.out + done.err
    assert "> " not in done.out


def test_first_message_from_an_option(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "message.txt").write_text("hello\n")
    (expected,) = answers(model, "hello")
    done = run("chat", model, *SHORT, "-p", "hello", stdin="never read\n")
    assert (done.code, done.out) == (0, expected.removesuffix("\n") + "\n")
    assert run("chat", model, *SHORT, "-f", tmp_path / "message.txt", "-q").err == ""
    assert run("chat", model, *SHORT, "-f", tmp_path / "message.txt").out == done.out


def test_thinking_goes_to_stderr_when_asked_for(run: Run, model: Path) -> None:
    hidden = run("chat", model, *SHORT, "-p", "hello", "-q")
    shown = run("chat", model, *SHORT, "-p", "hello", "-q", "--show-thinking")
    assert shown.out == hidden.out
    assert shown.err.startswith("thinking: ")


def test_commands(run: Run, model: Path) -> None:
    lines = [
        "/answer", "/undo", "/effort", "/effort high", "/system", "/system be brief", "/think off", "hello", "/answer",
        "/think off", "/think on", "/system -", "/effort enormous", "/think maybe", "/stats", "/undo", "/undo", "hello",
        "/reset", "/hepl", "/zzz", "/help", "/quit", "never read",
    ]  # fmt: skip
    done = run("chat", model, "-n", 9, "--temp", 0, "-t", 1, stdin="\n".join(lines))
    assert done.code == 1  # two arguments could not be used
    said = done.err.splitlines()[2:]
    for words in (
        "there is no answer yet",
        "there is nothing to undo",
        "effort is low",
        "effort is now high",
        "no system prompt",
        "system prompt changed",
        "thinking is now off",
        "thinking is off",
        "thinking is now on; the next message reads the conversation again (about ",
        "system prompt removed; the next message reads the conversation again (about ",
        "error: reasoning effort: expected one of low, medium, high, max, found 'enormous'",
        "error: /think: expected on or off, found 'maybe'",
        "context: ",
        "the last question is forgotten",
        "there is nothing to undo",
        "a new conversation begins",
        "unknown command /hepl: did you mean /help?",
        "unknown command /zzz: /help lists the commands",
        "/answer          print",
    ):
        assert any(words in line for line in said), words
        while words not in said[0]:
            said.pop(0)
    first, again, *_ = done.out.splitlines()
    assert first == again


def test_another_seed_is_drawn_for_another_answer(run: Run, model: Path) -> None:
    arguments = ("chat", model, "--no-think", "-n", 12, "-t", 1)
    drawn = run(*arguments, stdin="hello\n/undo\nhello\n")
    seeds = re.findall(r"seed (\d+) \(drawn\)", drawn.err)
    assert len(set(seeds)) == 2
    fixed = run(*arguments, "--seed", 3, stdin="hello\n/undo\nhello\n")
    assert fixed.out[: len(fixed.out) // 2] == fixed.out[len(fixed.out) // 2 :]
    assert "(drawn)" not in fixed.err


def test_context_limit_is_refused_and_the_conversation_goes_on(run: Run, model: Path) -> None:
    lines = f"hello\n{'long ' * 80}\nworld\n"
    done = run("chat", model, "-c", 200, "--no-think", "-n", 5, "-t", 1, stdin=lines)
    assert done.code == 1
    assert "error: The context holds 200 tokens" in done.err
    assert "/reset makes room" in done.err
    assert done.out.count("\n") >= 2
    alone = run("chat", model, "-c", 200, "-p", "long " * 80, "-t", 1)
    assert (alone.code, alone.out) == (2, "")


def test_a_failed_read_in_an_answer(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = Model.forward, []

    def failing(*arguments: object) -> np.ndarray:
        calls.append(1)
        if len(calls) == 6:
            raise StorageError("shard 3: read failed")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "forward", failing)
    done = run("chat", model, "--no-think", "-n", 12, "-t", 1, stdin="hello\nworld\n")
    assert done.code == 1
    assert "error: shard 3: read failed" in done.err
    assert len(calls) > 6  # the second message was answered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_answer(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    show, calls = AnswerView.show, []

    def interrupting(view: AnswerView, delta: Delta) -> None:
        show(view, delta)
        calls.append(delta)
        if len(calls) == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(AnswerView, "show", interrupting)
    typed = "hello\n/answer\nworld\n"
    arguments = ("chat", model, "--no-think", "-n", 40, "-t", 1, "--seed", 1)
    done = run(*arguments, stdin=typed, terminal=True)
    text = "".join(delta.text for delta in calls[:4])
    assert text in done.out
    assert "[stopped]" in done.err
    if number == signal.SIGTERM:
        assert (done.code, len(calls)) == (130, 4)
    else:
        assert done.code == 0
        assert done.out.count(text) == 2  # kept in the conversation
        assert len(calls) > 5  # and the next message was answered
    calls.clear()
    piped = run(*arguments, stdin=typed)
    assert (piped.code, len(calls)) == (130, 4)


def test_ctrl_c_at_the_prompt(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    typed = iter([KeyboardInterrupt, "/stats", KeyboardInterrupt, KeyboardInterrupt, "never read"])

    def read(_: PlainReader, __: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(PlainReader, "read", read)
    done = run("chat", model, terminal=True)
    assert done.code == 130
    assert done.err.count("Ctrl-C again leaves") == 2
    assert list(typed) == ["never read"]


def test_bad_bytes_and_settings(run: Run, model: Path) -> None:
    done = run("chat", model, "--no-think", "-n", 3, "-t", 1, stdin=b"hello\ncaf\xe9\nworld\n")
    assert done.code == 1
    assert "error: standard input, line 2: expected UTF-8 text, found byte 0xe9 at offset 3" in done.err
    for arguments, words in (
        (["--reasoning-effort", "hihg"], "expected one of low, medium, high, max"),
        (["--max-think-tokens", "-1"], "--max-think-tokens"),
        (["-p", "a", "-f", "b"], "expected one prompt"),
        (["--json"], "--json"),
        (["-s", "\udcff"], "--system: expected UTF-8 text, found byte 0xff"),
    ):
        refused = run("chat", model, *arguments)
        assert (refused.code, refused.out) == (2, ""), arguments
        assert words in refused.err
        assert "trunk" not in refused.err


def test_terminal_of_20_columns(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    done = run("chat", model, *SHORT, stdin="hello\n/help\n/stats\n/undo\n", terminal=True)
    assert done.code == 0
    assert "thinking: " in done.err
    assert "\x1b" not in done.err
    assert max(len(line) for line in done.err.splitlines() if not line.startswith("thinking")) <= 20


def test_a_long_prompt_is_announced(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(apps_chat, "WORTH_SAYING_S", 0.0)
    monkeypatch.setattr(screen, "REDRAW_S", 0.0)
    done = run("chat", model, "--no-think", "-n", 3, "-t", 1, stdin="hello\nworld\n", terminal=True)
    assert len(re.findall(r"reading \d+ new tokens, about 1 s", done.err)) == 1  # the first message has no speed yet
    assert "\x1b" not in done.out


def test_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "typed"
    path.write_text('one\\\ntwo\n"""three\n\n  four"""\n"""\nfive\n"""\n"""six"""\nseven\\')
    with path.open("rb") as stream:
        reader = PipeReader(stream)
        found = [read_message(reader) for _ in range(5)]
        with pytest.raises(EOFError):
            read_message(reader)
    assert found == ["one\ntwo", "three\n\n  four", "five", "six", "seven"]


def test_reader_for_a_terminal_without_prompt_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Tty())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    assert isinstance(open_reader(lambda _: ""), PlainReader)


def test_prompt_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        reader = ToolkitReader(lambda columns: f"{columns} columns")
        typed.send_text("one\x1b\rtwo\r")
        assert read_message(reader) == "one\ntwo"
        typed.send_text("abc\x03")
        with pytest.raises(KeyboardInterrupt):
            reader.read("> ")
        assert reader.had_text()
        typed.send_text("\x04")
        with pytest.raises(EOFError):
            reader.read("> ")
    history = tmp_path / "moe-streamer" / chat_input.HISTORY_FILE
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+one" in history.read_text()


def test_what_leaves_room_for_an_answer(run: Run, model: Path) -> None:
    common = ("chat", model, "-p", "hello", "--temp", 0, "-t", 1)
    assert "while thinking (--max-think-tokens or a larger -n leaves room for one)" in run(*common, "-n", 4).err
    assert "while thinking (a larger -n leaves room for one)" in run(*common, "-n", 1, "--max-think-tokens", 0).err
    assert "while thinking (/undo, /reset or a larger --ctx-size makes room)" in run(*common, "-c", 290).err


def test_no_command_that_destroys_is_suggested(run: Run, model: Path) -> None:
    done = run("chat", model, "-t", 1, stdin="/rset\n/und\n/quti\n/Reset\n")
    for command in apps_chat.DESTRUCTIVE:
        assert f"did you mean /{command}" not in done.err
