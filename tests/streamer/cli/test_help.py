"""Help: complete, narrow, quick; the same option means the same in every verb."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from streamer.cli.main import app
from tests.streamer.cli.conftest import Done

ROOT = Path(__file__).resolve().parents[3]
VERBS = ("generate", "chat")


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from streamer.cli.main import execute
for arguments in (["--help"], ["generate", "--help"], ["chat", "--help"]):
    assert execute(arguments) == 0
heavy = {"torch", "numba", "numpy", "tiktoken", "prompt_toolkit", "rich.console"} & set(sys.modules)
assert not heavy, heavy
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(run: Callable[..., Done], verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    done = run(verb, "--help")
    assert (done.code, done.err) == (0, "")
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
        assert all(name in done.out for name in parameter.opts if name.startswith("-"))


def test_shared_options_have_one_meaning() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen: dict[str, tuple[object, ...]] = {}
    for verb in commands:
        for parameter in commands[verb].params:
            meaning = (parameter.name, tuple(parameter.opts), parameter.default, getattr(parameter, "help", ""))
            for name in parameter.opts:
                assert seen.setdefault(name, meaning) == meaning, f"{name} of {verb}"
