"""The `streamer` command: registers the verbs and turns errors into one message and an exit code.

Verbs import what they need when they run: `--help` loads neither numpy, numba nor torch.

Exit codes: 0; 1 a check failed; 2 bad usage or bad input, with a sentence; 130 interrupted; 141 the reader of standard
output went away (`| head`), with no message. The last is what a shell reports of any filter that SIGPIPE ends: not a
failure, but not the whole text either. A standard error that cannot be written changes nothing.
"""

import sys
import traceback
from collections.abc import Sequence

import typer

from storage.errors import StorageError
from streamer.cli.chat import chat_command
from streamer.cli.generate import generate_command
from streamer.cli.inspect import inspect_command
from streamer.cli.interrupt import EXIT_INTERRUPTED
from streamer.cli.streams import EXIT_READER_GONE, OutputError, open_streams
from streamer.config.errors import StreamerError

EXIT_BAD_INPUT = 2
OUT_OF_MEMORY = (
    "there is not enough memory. Free some, raise the limit of this process (ulimit -v, a container's memory), or ask"
    " for less with --slots and --ctx-size."
)

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
    """Run one command line; return its exit code."""
    debug = _has_debug(arguments)
    try:
        try:
            app(list(arguments), prog_name="streamer")
        finally:
            sys.stdout.flush()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OutputError as error:
        return EXIT_READER_GONE if error.reader_gone else _fail(str(error), debug)
    except (StreamerError, StorageError) as error:
        return _fail(str(error), debug)
    except MemoryError:
        return _fail(OUT_OF_MEMORY, debug)
    return 0


def _fail(message: str, debug: bool) -> int:
    """Say what went wrong; inside an except clause."""
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


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
    open_streams()
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    run()
