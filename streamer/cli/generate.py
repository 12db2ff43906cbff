"""`streamer generate`: renders what `streamer.apps.generate` yields."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from storage.errors import StorageError
from streamer.apps.prompt import read_prompt
from streamer.cli import options as opt
from streamer.cli.chat_input import piped_input
from streamer.cli.interrupt import EXIT_INTERRUPTED, Interrupts
from streamer.cli.progress import LoadingProgress, PromptStatus
from streamer.cli.screen import Screen
from streamer.config.errors import StreamerError, UsageError

if TYPE_CHECKING:
    from streamer.apps.generate import GenerateRequest
    from streamer.apps.logits_file import LogitsFile
    from streamer.config.options import EngineOptions
    from streamer.llm import LLM
    from streamer.outputs import RequestOutput

LOGPROBS = typer.Option(
    None, "--logprobs", metavar="N", help="With --json: the log-probability of each token and the N likeliest."
)
STREAM = typer.Option(True, "--stream/--no-stream", help="Print text as it comes, or all of it at the end.")
DUMP_LOGITS = typer.Option(
    None,
    "--dump-logits",
    metavar="FILE.npy",
    help="Write float32 [positions, vocabulary]: row i holds the logits after token i of prompt + text, for every"
    " token but the last one generated. The file appears when it is complete.",
)


def generate_command(
    model: Path | None = opt.MODEL,
    model_dir: list[Path] | None = opt.MODEL_DIR,
    prompt: str | None = opt.PROMPT,
    file: Path | None = opt.FILE,
    ids: str | None = opt.IDS,
    max_tokens: int | None = opt.MAX_TOKENS,
    temperature: float | None = opt.TEMPERATURE,
    top_p: float | None = opt.TOP_P,
    top_k: int | None = opt.TOP_K,
    min_p: float | None = opt.MIN_P,
    seed: int | None = opt.SEED,
    stop: list[str] | None = opt.STOP,
    ctx_size: int | None = opt.CTX_SIZE,
    threads: int | None = opt.THREADS,
    memory: str = opt.MEMORY,
    trunk: str = opt.TRUNK,
    slots: int | None = opt.SLOTS,
    prefetch: bool = opt.PREFETCH,
    prefill_chunk: int | None = opt.PREFILL_CHUNK,
    stream: bool = STREAM,
    as_json: bool = opt.JSON,
    logprobs: int | None = LOGPROBS,
    dump_logits: str | None = DUMP_LOGITS,
    verbose: bool = opt.VERBOSE,
    quiet: bool = opt.QUIET,
) -> None:
    """Continue a text as it stands, without the chat format.

    The prompt comes from -p, -f or --ids, else from a pipe. Up to 256 tokens are generated where -n does not say.
    The text goes to standard output and ends with a newline; --json has it exactly. Ctrl-C keeps what is there.
    """
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is printed by --json only. Add --json.")
    if dump_logits is not None and (not dump_logits or dump_logits.endswith("/")):  # a Path would hide either
        raise UsageError(f"--dump-logits: expected a file name, found {dump_logits!r}.")
    directories = opt.model_directories(model, model_dir)
    engine_options = opt.engine_options(memory, trunk, slots, prefetch, ctx_size, prefill_chunk, threads)
    screen = Screen(opt.verbosity(verbose, quiet))
    with screen, Interrupts() as interrupts:
        source = read_prompt(prompt, file, ids, piped_input())
        screen.status(f"loading {opt.model_name(directories)}")
        from streamer.apps import generate as app

        flags = opt.sampling_flags(temperature, top_p, top_k, min_p, seed, max_tokens, stop)
        request = app.prepare(directories, source, replace(flags, logprobs=logprobs), engine_options)
        run = _Run(screen, interrupts, request, as_json, stream)
        run.start(directories, engine_options, Path(dump_logits) if dump_logits else None)
    if interrupts.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


class _Run:
    """One request on the screen."""

    def __init__(
        self, screen: Screen, interrupts: Interrupts, request: GenerateRequest, as_json: bool, stream: bool
    ) -> None:
        self._screen = screen
        self._interrupts = interrupts
        self._request = request
        self._as_json = as_json
        self._stream = stream and not as_json
        self._held: list[str] = []  # text that is printed at the end

    def start(self, directories: list[Path], options: EngineOptions, dump: Path | None) -> None:
        """Load the model, generate, print."""
        from streamer.apps.logits_file import LogitsFile
        from streamer.cli.summary import header
        from streamer.llm import LLM

        request, screen = self._request, self._screen
        n_prompt = len(request.prompt_ids)
        file = LogitsFile(dump, request.config.vocab_size, n_prompt) if dump is not None else nullcontext()
        with file as logits:
            clean_up = logits.remove_part if logits else None
            with self._interrupts.loading(clean_up):
                llm = LLM(directories, options, LoadingProgress(screen))
            with llm:
                screen.note(header(opt.model_name(directories), llm, request.params, request.seed_drawn))
                screen.note(f"prompt {n_prompt:,} tokens, at most {request.params.max_tokens:,} more", 1)
                with self._interrupts.during(llm.cancel, clean_up):
                    output = self._generate(llm, logits)
                self._finish(llm, output, logits)

    def _generate(self, llm: LLM, logits: LogitsFile | None) -> RequestOutput:
        """Print text as it comes; what there is when a read fails is printed before the error."""
        from streamer.apps.generate import run
        from streamer.outputs import RequestOutput
        from streamer.session import PromptProgress

        status = PromptStatus(self._screen, llm)
        n_steps = 0
        try:
            for event in run(llm, self._request, logits):
                self._interrupts.repeat()
                if isinstance(event, PromptProgress):
                    status.show(event)
                    continue
                if n_steps == 0:
                    status.finish()
                if isinstance(event, RequestOutput):
                    return event
                n_steps += 1
                self._text(event, n_steps)
        except (StreamerError, StorageError) as error:
            self._failed(error)
            raise
        finally:
            status.finish()
        raise AssertionError("a run ends with its output")

    def _text(self, text: str, n_steps: int) -> None:
        if self._stream:
            self._screen.text(text)
        else:
            self._held.append(text)
            self._screen.status(f"generating: {n_steps:,} of at most {self._request.params.max_tokens:,} tokens")

    def _failed(self, error: Exception) -> None:
        text = "".join(self._held)
        if self._as_json:
            _print_json({"error": str(error), "text": text, "finish_reason": "error"}, self._screen)
        else:
            self._screen.text(text)
            self._screen.end_line()

    def _finish(self, llm: LLM, output: RequestOutput, logits: LogitsFile | None) -> None:
        from streamer.apps.generate import report
        from streamer.cli.summary import ending, summary

        completion, screen = output.outputs[0], self._screen
        if logits is not None and completion.finish_reason != "cancelled":
            logits.finish()
        if self._as_json:
            _print_json(report(llm, self._request, output), screen)
        else:
            screen.text("".join(self._held))
            screen.end_line()
        n_tokens = len(completion.token_ids)
        full = len(output.prompt_token_ids) + n_tokens >= llm.context_tokens
        why = ending(completion.finish_reason, completion.stop_reason, self._request.params.max_tokens, full)
        screen.note(summary(n_tokens, output.stats, why))
        if logits is not None and completion.finish_reason == "cancelled":
            screen.note(f"{logits.path} was not written: the run was interrupted")
        elif logits is not None:
            screen.note(f"logits of {logits.rows:,} positions are in {logits.path}")


def _print_json(value: dict[str, Any], screen: Screen) -> None:
    # One line, escaped to ASCII: the last line of standard output is the object, whatever the locale.
    screen.text(json.dumps(value) + "\n")
