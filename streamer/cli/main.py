"""The `streamer` command: registers the verbs and turns errors into one message and an exit code.

Verbs import what they need when they run: `--help` loads neither numpy, numba nor torch.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from storage.errors import StorageError
from streamer.cli.chat import chat_command
from streamer.cli.generate import generate_command
from streamer.cli.inspect import inspect_command
from streamer.cli.interrupt import EXIT_INTERRUPTED
from streamer.config.errors import StreamerError

EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="streamer",
    help="Run the complete Kimi K3 checkpoint on one workstation: experts paged from NVMe, everything else in RAM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(chat_command)
app.command("generate")(generate_command)
app.command("inspect")(inspect_command)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("moe-streamer")
    except PackageNotFoundError:  # a source tree that was never installed
        number = "(not installed)"
    typer.echo(f"moe-streamer {number}")
    raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    pass  # `--debug` is read by `execute`, which is where errors arrive


def execute(arguments: Sequence[str]) -> int:
    """Run one command line; return 0, 1 (a check failed), 2 (usage or bad input) or 130 (interrupted)."""
    debug = _has_debug(arguments)
    try:
        app(list(arguments), prog_name="streamer")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (StreamerError, StorageError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def _has_debug(arguments: Sequence[str]) -> bool:
    """Whether --debug is among the options before the verb; behind it the word may be a prompt."""
    for argument in arguments:
        if not argument.startswith("-"):
            return False
        if argument == "--debug":
            return True
    return False


def run() -> None:
    """Entry point of the console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed: what is written goes nowhere
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for good
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a file name that is not UTF-8 must not end the program
    code = execute(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone. Python would flush again at exit and complain, so give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    run()
