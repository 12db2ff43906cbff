"""`streamer chat`: renders a conversation; `streamer.apps.chat` knows what lines and commands mean."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from storage.errors import StorageError
from streamer.apps.prompt import read_prompt
from streamer.cli import options as opt
from streamer.cli.chat_input import LineReader, open_reader, piped_input, read_message
from streamer.cli.interrupt import EXIT_INTERRUPTED, Interrupts
from streamer.cli.progress import LoadingProgress, PromptStatus, duration
from streamer.cli.screen import Screen
from streamer.config.errors import StreamerError

if TYPE_CHECKING:
    from streamer.apps.chat import Chat, ChatSettings
    from streamer.config.options import EngineOptions
    from streamer.llm import LLM
    from streamer.session import Answer, Session

EXIT_SOME_FAILED = 1

SHOW_THINKING = typer.Option(
    None,
    "--show-thinking/--hide-thinking",
    help="Print the thinking on standard error. Default: on a terminal only.",
)


def chat_command(
    model: Path | None = opt.MODEL,
    model_dir: list[Path] | None = opt.MODEL_DIR,
    prompt: str | None = opt.PROMPT,
    file: Path | None = opt.FILE,
    system: str | None = opt.SYSTEM,
    max_tokens: int | None = opt.MAX_TOKENS,
    max_think_tokens: int | None = opt.MAX_THINK_TOKENS,
    temperature: float | None = opt.TEMPERATURE,
    top_p: float | None = opt.TOP_P,
    top_k: int | None = opt.TOP_K,
    min_p: float | None = opt.MIN_P,
    seed: int | None = opt.SEED,
    stop: list[str] | None = opt.STOP,
    effort: str = opt.EFFORT,
    think: bool = opt.THINK,
    show_thinking: bool | None = SHOW_THINKING,
    ctx_size: int | None = opt.CTX_SIZE,
    threads: int | None = opt.THREADS,
    memory: str = opt.MEMORY,
    trunk: str = opt.TRUNK,
    slots: int | None = opt.SLOTS,
    prefetch: bool = opt.PREFETCH,
    prefill_chunk: int | None = opt.PREFILL_CHUNK,
    verbose: bool = opt.VERBOSE,
    quiet: bool = opt.QUIET,
) -> None:
    """Talk with a model.

    -p or -f is the first message; on a terminal the conversation goes on after it, else the command ends. Without
    them, each line of a pipe is a message and only answers go to standard output. Ctrl-C stops an answer and keeps it;
    Ctrl-D leaves; /help lists the commands.
    """
    directories = opt.model_directories(model, model_dir)
    engine_options = opt.engine_options(memory, trunk, slots, prefetch, ctx_size, prefill_chunk, threads)
    screen = Screen(opt.verbosity(verbose, quiet))
    with screen, Interrupts() as interrupts:
        given = prompt is not None or file is not None
        first = read_prompt(prompt, file, None, piped_input()) if given else None
        screen.status(f"loading {opt.model_name(directories)}")
        from streamer.apps.chat import prepare

        settings = prepare(
            directories,
            opt.sampling_flags(temperature, top_p, top_k, min_p, seed, max_tokens, stop),
            system=system,
            thinking=think,
            effort=effort,
            max_think_tokens=max_think_tokens,
        )
        loop = _Loop(screen, interrupts, show_thinking)
        code = loop.start(directories, engine_options, settings, first if isinstance(first, str) else None)
    raise typer.Exit(code)


class _Loop:
    """Reads messages, shows answers, until somebody leaves."""

    def __init__(self, screen: Screen, interrupts: Interrupts, show_thinking: bool | None) -> None:
        self._screen = screen
        self._interrupts = interrupts
        on_terminal = screen.text_on_terminal and screen.notes_on_terminal and screen.level >= 0
        self._show_thinking = on_terminal if show_thinking is None else show_thinking
        self._show_stats = (screen.notes_on_terminal and screen.level >= 0) or screen.level > 0
        self._some_failed = False

    def start(self, directories: list[Path], options: EngineOptions, settings: ChatSettings, first: str | None) -> int:
        """Load the model and talk; return the exit code."""
        from streamer.apps.chat import Chat
        from streamer.cli.summary import header
        from streamer.llm import LLM

        with self._interrupts.loading():
            llm = LLM(directories, options, LoadingProgress(self._screen))
        with llm:
            chat = Chat(llm, settings)
            mode = f"effort {settings.effort}" if settings.thinking else "no thinking"
            name = opt.model_name(directories)
            self._screen.note(header(name, llm, settings.params, settings.seed_drawn, mode))
            if first is not None:
                self._turn(llm, chat, first)  # an error of the only message is the command's error
                if self._interrupts.stopped:
                    return EXIT_INTERRUPTED
                if piped_input() is not None or sys.stdin is None or not sys.stdout.isatty():
                    return 0
            return self._talk(llm, chat, open_reader(lambda columns: _toolbar(chat, columns)))

    def _talk(self, llm: LLM, chat: Chat, reader: LineReader) -> int:
        armed = False  # whether another Ctrl-C leaves
        if reader.interactive:
            self._screen.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        while True:
            try:
                text = read_message(reader)
            except EOFError:
                return EXIT_SOME_FAILED if self._some_failed else 0
            except StreamerError as error:
                self._failed(error, reader)
                continue
            except KeyboardInterrupt:
                if armed or self._interrupts.terminated or not reader.interactive:
                    return EXIT_INTERRUPTED
                armed = not reader.had_text()
                if armed:
                    self._screen.note("Ctrl-C again leaves, and so does Ctrl-D")
                continue
            armed = False
            try:
                if self._leaves(llm, chat, text):
                    return EXIT_SOME_FAILED if self._some_failed else 0
            except (StreamerError, StorageError) as error:
                self._failed(error, reader)
            if self._interrupts.terminated or (self._interrupts.stopped and not reader.interactive):
                return EXIT_INTERRUPTED

    def _failed(self, error: Exception, reader: LineReader) -> None:
        """The conversation goes on. A person saw the error; a script needs the exit code."""
        from streamer.config.errors import ContextLimitError

        self._some_failed |= not reader.interactive
        self._screen.error(error)
        if isinstance(error, ContextLimitError):
            self._screen.note("/undo or /reset makes room; the conversation is as it was")

    def _leaves(self, llm: LLM, chat: Chat, text: str) -> bool:
        """Send a message or do what a command says; return whether it says to leave."""
        from streamer.apps.chat import parse

        parsed = parse(text)
        if isinstance(parsed, str):
            if parsed.strip():
                self._turn(llm, chat, parsed)
            return False
        reply = chat.execute(parsed)
        for note in reply.notes:
            self._screen.note(note)
        if reply.text is not None:
            self._screen.text(reply.text)
            self._screen.end_line()
        return reply.leave

    def _turn(self, llm: LLM, chat: Chat, text: str) -> None:
        """Say `text` and show the answer."""
        from streamer.apps.chat import WORTH_SAYING_S
        from streamer.cli.answer_view import AnswerView
        from streamer.session import Answer, PromptProgress

        status, view = PromptStatus(self._screen, llm), AnswerView(self._screen, self._show_thinking)
        answer: Answer | None = None
        with self._interrupts.during(llm.cancel):
            tokens, seconds = chat.expected_prefill(text)
            if seconds is not None and seconds > WORTH_SAYING_S:
                self._screen.status(f"reading {tokens:,} new tokens, about {duration(seconds)}")
            try:
                for event in chat.send(text):
                    self._interrupts.repeat()
                    if isinstance(event, PromptProgress):
                        status.show(event)
                    elif isinstance(event, Answer):
                        answer = event
                    else:
                        status.finish()
                        view.show(event)
            finally:
                status.finish()
                view.finish()
        if answer is not None:
            self._after(chat, answer)

    def _after(self, chat: Chat, answer: Answer) -> None:
        """Say how the answer ended: a limit must not look like an end."""
        from streamer.cli.summary import ending, summary

        session, screen = chat.session, self._screen
        max_tokens = session.params.max_tokens
        full = max_tokens is None or len(answer.token_ids) < max_tokens
        why = ending(answer.finish_reason, None, max_tokens, full)
        if answer.finish_reason == "cancelled":
            screen.note("[stopped]")
        elif answer.finish_reason == "length" and not self._show_stats:
            screen.note(why)
        if answer.message.reasoning and not answer.message.content and answer.finish_reason != "cancelled":
            screen.note("there is no answer: it ended while thinking" + _room(answer, session, full))
        if self._show_stats:
            used = f"context {session.context_used:,} of {session.context_tokens:,}"
            limit = why if answer.finish_reason == "length" else ""
            screen.note(summary(len(answer.token_ids), answer.stats, used, limit))


def _room(answer: Answer, session: Session, full: bool) -> str:
    """Return what leaves room for an answer after the thinking, where room is what was missing."""
    if answer.finish_reason != "length":
        return ""
    if full:
        return " (/undo, /reset or a larger --ctx-size makes room)"
    limited = session.max_think_tokens is not None
    return f" ({'a larger -n' if limited else '--max-think-tokens or a larger -n'} leaves room for one)"


def _toolbar(chat: Chat, columns: int) -> str:
    """Return the status bar: as much as fits."""
    from streamer.cli.summary import speed

    session = chat.session
    parts = [f"context {session.context_used:,}/{session.context_tokens:,}"]
    if chat.last is not None:
        stats = chat.last.stats
        parts.append(speed(stats.decode_tokens_per_s))
        if stats.decode_hit_rate is not None:
            parts.append(f"experts in memory {stats.decode_hit_rate:.0%}")
    while len(parts) > 1 and len(" | ".join(parts)) > columns:
        parts.pop()
    return " | ".join(parts)[:columns]
