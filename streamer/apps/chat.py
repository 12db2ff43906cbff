"""A conversation's state behind the chat command: what a line means, what a command does. Data only, no terminal."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamer.apps.prompt import checked
from streamer.apps.sampling import SamplingFlags, redrawn
from streamer.config.errors import UsageError
from streamer.config.load import load_generation_defaults, load_model_config
from streamer.engine.sampling import SamplingParams
from streamer.engine.stats import RunStats
from streamer.llm import LLM
from streamer.session import Answer, PromptProgress
from streamer.text.parsed import Delta
from streamer.text.tokenizer import Tokenizer
from streamer.text.tools import check_effort

GB = 1e9
WORTH_SAYING_S = 2.0  # a prompt that takes longer is announced before it is read

HELP = (
    ("/help", "this list"),
    ("/system [TEXT]", "show the system prompt, or change it; '/system -' removes it"),
    ("/think [on|off]", "let the model think before it answers, or not"),
    ("/effort [LEVEL]", "how long it thinks: low, medium, high or max"),
    ("/answer", "print the last answer again, without its thinking"),
    ("/undo", "forget the last question and its answer"),
    ("/reset", "begin a new conversation with the same settings"),
    ("/stats", "context used, speed, hit rates and bytes so far"),
    ("/quit", "leave; Ctrl-D does the same"),
    ("//text", "send a text that begins with a slash"),
    ('"""', "begin or end a text of several lines; a line that ends in \\ goes on in the next"),
)
DESTRUCTIVE = ("undo", "reset", "quit")  # never suggested: whoever mistyped would only confirm it
COMMANDS = ("help", "system", "think", "effort", "answer", "undo", "reset", "stats", "quit")


@dataclass(frozen=True, slots=True)
class Command:
    """A line that begins with a slash."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command says: `notes` for a person, `text` where it prints an answer."""

    notes: tuple[str, ...] = ()
    text: str | None = None
    leave: bool = False


def parse(text: str) -> Command | str:
    """Return a command, or the message to send. Several lines are a message unless they begin with a known command."""
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, _, argument = text[1:].partition(" ")
    if "\n" in text and name not in COMMANDS:
        return text
    return Command(name.strip(), argument.strip())


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """A conversation's settings, checked before a model is loaded."""

    params: SamplingParams
    seed_drawn: bool
    system: str | None
    thinking: bool
    effort: str
    max_think_tokens: int | None


def prepare(
    directories: Sequence[Path],
    flags: SamplingFlags,
    *,
    system: str | None,
    thinking: bool,
    effort: str,
    max_think_tokens: int | None,
) -> ChatSettings:
    """Check settings against the checkpoint's configuration and tokenizer. Raises a StreamerError."""
    check_effort(effort)
    if max_think_tokens is not None and max_think_tokens < 0:
        raise UsageError(f"--max-think-tokens: expected 0 or more, found {max_think_tokens}.")
    config = load_model_config(directories)
    params = flags.params(load_generation_defaults(directories, config))
    Tokenizer.from_directories(directories, config.vocab_size).encode(checked(system or "", "--system"))
    return ChatSettings(params, flags.seed is None, system, thinking, effort, max_think_tokens)


class Chat:
    """One conversation and its commands."""

    def __init__(self, llm: LLM, settings: ChatSettings) -> None:
        self._llm = llm
        self._seed_drawn = settings.seed_drawn
        self._began = RunStats.of(llm.engine)
        self.last: Answer | None = None
        self.session = llm.session(
            system=settings.system,
            thinking=settings.thinking,
            effort=settings.effort,
            params=settings.params,
            max_think_tokens=settings.max_think_tokens,
        )

    def send(self, text: str) -> Iterator[PromptProgress | Delta | Answer]:
        """Say something; see `Session.send`."""
        for event in self.session.send(text):
            if isinstance(event, Answer):
                self.last = event
            yield event

    def expected_prefill(self, text: str) -> tuple[int, float | None]:
        """Tokens to read before the answer to `text` begins, and the seconds that may take, once a speed is known."""
        tokens = self.session.pending_tokens(text)
        speed = (RunStats.of(self._llm.engine) - self._began).prefill_tokens_per_s
        return tokens, tokens / speed if speed else None

    def execute(self, command: Command) -> Reply:
        """Do what a command says. Raises UsageError for an argument that cannot be used."""
        actions: dict[str, Callable[[str], Reply]] = {
            "help": lambda _: Reply(tuple(f"{name:<16} {what}" for name, what in HELP)),
            "system": self._system,
            "think": self._think,
            "effort": self._effort,
            "answer": self._answer,
            "undo": self._undo,
            "reset": self._reset,
            "stats": self._stats,
            "quit": lambda _: Reply(leave=True),
        }
        action = actions.get(command.name)
        if action is not None:
            return action(command.argument)
        harmless = [name for name in COMMANDS if name not in DESTRUCTIVE]
        close = difflib.get_close_matches(command.name, harmless, n=1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
        return Reply((f"unknown command /{command.name}: {hint} (// sends a text that begins with a slash)",))

    def _system(self, text: str) -> Reply:
        conversation = self.session.conversation
        if not text:
            return Reply((f"system prompt: {conversation.system}" if conversation.system else "no system prompt",))
        conversation.set_system(None if text == "-" else text)
        return self._changed("system prompt removed" if text == "-" else "system prompt changed")

    def _think(self, word: str) -> Reply:
        conversation = self.session.conversation
        if word not in ("", "on", "off"):
            raise UsageError(f"/think: expected on or off, found {word!r}.")
        if word in ("", "on" if conversation.thinking else "off"):
            return Reply((f"thinking is {'on' if conversation.thinking else 'off'}",))
        conversation.set_thinking(word == "on")
        return self._changed(f"thinking is now {word}")

    def _effort(self, level: str) -> Reply:
        conversation = self.session.conversation
        if level in ("", conversation.effort):
            return Reply((f"effort is {conversation.effort}",))
        conversation.set_effort(level)
        if not conversation.thinking:
            return Reply((f"effort is now {level}; it counts once thinking is on",))
        return self._changed(f"effort is now {level}")

    def _answer(self, _: str) -> Reply:
        answers = [m["content"] for m in self.session.conversation.messages() if m["role"] == "assistant"]
        if not answers:
            return Reply(("there is no answer yet",))
        return Reply(text=answers[-1]) if answers[-1] else Reply(("the last answer is empty: it ended while thinking",))

    def _undo(self, _: str) -> Reply:
        if not self.session.conversation.undo():
            return Reply(("there is nothing to undo",))
        return self._changed("the last question is forgotten", self._redraw())

    def _reset(self, _: str) -> Reply:
        self.session.reset()
        return Reply(("a new conversation begins", *self._redraw()))

    def _redraw(self) -> tuple[str, ...]:
        """With the same seed the same question at the same place would get the same answer."""
        if not self._seed_drawn or self.session.params.temperature == 0:
            return ()
        self.session.params = redrawn(self.session.params)
        return (f"seed {self.session.params.seed} (drawn)",)

    def _changed(self, what: str, more: tuple[str, ...] = ()) -> Reply:
        """A change of what was already read: say what it costs."""
        if not self.session.context_used:
            return Reply((what, *more))
        tokens = self.session.pending_tokens("")
        return Reply((f"{what}; the next message reads the conversation again (about {tokens:,} tokens)", *more))

    def _stats(self, _: str) -> Reply:
        session, stats = self.session, RunStats.of(self._llm.engine) - self._began
        lines = [f"context: {session.context_used:,} of {session.context_tokens:,} tokens"]
        if stats.prefill_tokens:
            lines.append(f"read: {stats.prefill_tokens:,} tokens, {stats.prefill_tokens_per_s:.3g} tokens/s")
        if stats.decode_tokens:
            lines.append(f"generated: {stats.decode_tokens:,} tokens, {stats.decode_tokens_per_s:.3g} tokens/s")
        for what, rate in (("reading", stats.prefill_hit_rate), ("generating", stats.decode_hit_rate)):
            if rate is not None:
                lines.append(f"experts found in memory while {what}: {rate:.1%}")
        lines.append(f"experts read: {stats.bytes_read / GB:.2f} GB; waited {stats.wait_s:.1f} s for reads")
        return Reply(tuple(lines))
