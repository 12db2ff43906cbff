"""Arguments that several verbs share, and what they mean. The same name has the same default everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from streamer.config import bundled
from streamer.config.errors import UsageError
from streamer.config.load import requested_threads, set_thread_variables
from streamer.config.options import DEFAULT_CONTEXT_TOKENS, EngineOptions

if TYPE_CHECKING:
    from streamer.apps.sampling import SamplingFlags

DEFAULT_EFFORT = "low"  # the model's own default is max; at seconds per token thinking is the longest wait

# The model
MODEL = typer.Argument(None, metavar="MODEL", help="Model directory, as downloaded. Default: the bundled k3-nano.")
MODEL_DIR = typer.Option(None, "--model-dir", metavar="DIR", help="Further directory with shards. Repeatable.")
CTX_SIZE = typer.Option(
    None,
    "-c",
    "--ctx-size",
    metavar="TOKENS",
    help=f"Longest conversation. Default: {DEFAULT_CONTEXT_TOKENS:,}, or less where the model ends before.",
)
THREADS = typer.Option(None, "-t", "--threads", metavar="N", help="Threads for computing. Default: physical cores.")
MEMORY = typer.Option(
    "auto", "--memory", metavar="SIZE", help="Memory for all of this program: 48GiB, 75% of what there is, or auto."
)
TRUNK = typer.Option(
    "auto",
    "--trunk",
    metavar="FORMAT",
    help="Format of the weights that are not experts: bf16 (exact), int8 or int4 (lossy), or auto: bf16 where it fits.",
)
SLOTS = typer.Option(
    None, "--slots", metavar="N", help="Experts per layer kept in memory. Default: as many as --memory has room for."
)
PREFETCH = typer.Option(
    True, "--prefetch/--no-prefetch", help="Read experts ahead that later layers are predicted to want, or not."
)
PREFILL_CHUNK = typer.Option(
    None,
    "--prefill-chunk",
    metavar="TOKENS",
    help="Prompt tokens that go through a layer together. Default: up to 2,048, as --memory has room for.",
)

# The prompt
PROMPT = typer.Option(None, "-p", "--prompt", metavar="TEXT", help="The prompt.")
FILE = typer.Option(
    None,
    "-f",
    "--file",
    metavar="FILE",
    help="Read the prompt from a UTF-8 file, '-' for standard input. One newline at its very end is dropped.",
)
IDS = typer.Option(None, "--ids", metavar="1,2,3", help="The prompt as token ids; needs no tokenizer files.")
SYSTEM = typer.Option(None, "-s", "--system", metavar="TEXT", help="System prompt.")

# Sampling
TEMPERATURE = typer.Option(
    None, "--temperature", "--temp", metavar="T", help="0 takes the likeliest token. Default: generation_config.json."
)
TOP_P = typer.Option(
    None, "--top-p", metavar="P", help="Sample from the likeliest with this mass. Default: generation_config.json."
)
TOP_K = typer.Option(None, "--top-k", metavar="K", help="Sample from the K likeliest; 0 is no limit.")
MIN_P = typer.Option(None, "--min-p", metavar="P", help="Drop tokens below P times the likeliest. Default: 0.")
SEED = typer.Option(None, "--seed", metavar="N", help="Repeat a run exactly. Default: one is drawn and printed.")
STOP = typer.Option(None, "--stop", metavar="TEXT", help="Stop before this text, taken literally. Repeatable.")
MAX_TOKENS = typer.Option(None, "-n", "--max-tokens", metavar="N", help="Most tokens to generate.")

# Thinking
MAX_THINK_TOKENS = typer.Option(
    None, "--max-think-tokens", metavar="N", help="End the thinking after N tokens and let the model answer."
)
EFFORT = typer.Option(
    DEFAULT_EFFORT,
    "--reasoning-effort",
    metavar="LEVEL",
    help="How long it thinks: low, medium, high or max. The model's own default is max.",
)
THINK = typer.Option(True, "--think/--no-think", help="Think before answering, or not.")

# What is printed
JSON = typer.Option(False, "--json", help="Print one JSON object.")
VERBOSE = typer.Option(False, "-v", "--verbose", help="Say more on standard error.")
QUIET = typer.Option(False, "-q", "--quiet", help="Nothing on standard error but errors.")


def model_directories(model: Path | None, further: list[Path] | None) -> list[Path]:
    """Return the directories of a model, the bundled one where none is named; raise UsageError where it is absent."""
    if model is not None:
        return [model, *(further or [])]
    if further:
        raise UsageError("--model-dir adds directories to MODEL; expected MODEL as well")
    if not bundled.BUNDLED.is_dir():
        raise UsageError(f"the bundled model is not installed ({bundled.BUNDLED} is absent); name a model directory")
    return bundled.model_directory(None)


def model_name(directories: list[Path]) -> str:
    """Return what a header calls a model."""
    if directories == [bundled.BUNDLED]:
        return f"{bundled.BUNDLED.name} (bundled)"
    return directories[0].resolve().name or str(directories[0])


def engine_options(
    memory: str,
    trunk: str,
    slots: int | None,
    prefetch: bool,
    ctx_size: int | None,
    prefill_chunk: int | None,
    threads: int | None,
) -> EngineOptions:
    """Return checked options; limit every thread pool to the threads asked for, before a kernel is imported.

    Where numba is imported already (tests, embedding) its pool has its size, and it refuses another one.
    """
    threads = threads if threads is not None else requested_threads()
    options = EngineOptions(
        memory=memory,
        trunk=trunk,
        slots=slots,
        prefetch=prefetch,
        context_tokens=ctx_size,
        prefill_chunk=prefill_chunk,
        threads=threads,
    )
    if threads is not None and "numba" not in sys.modules:
        set_thread_variables(threads)
    return options


def sampling_flags(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    max_tokens: int | None,
    stop: list[str] | None,
) -> SamplingFlags:
    """Return the sampling options as given."""
    from streamer.apps.sampling import SamplingFlags

    return SamplingFlags(temperature, top_p, top_k, min_p, seed, max_tokens, tuple(stop or ()))


def verbosity(verbose: bool, quiet: bool) -> int:
    """Return -1 (quiet), 0 or 1 (verbose)."""
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other. Leave one of them out.")
    return int(verbose) - int(quiet)
