"""Sentences about what takes time: loading a model, reading a prompt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from streamer.cli.screen import Screen
from streamer.config.load import kernels_are_cached

if TYPE_CHECKING:
    from streamer.apps.prompt_meter import PromptMeter
    from streamer.llm import LLM
    from streamer.session import PromptProgress

GB = 1e9
WORTH_AN_ESTIMATE_S = 3.0


def duration(seconds: float) -> str:
    """Return '12 s', '4 min' or '1 h 05 min'."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class LoadingProgress:
    """The callback of `LLM(progress=…)`, as status lines."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._what = ""
        self._began = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` of a phase is done."""
        now = time.monotonic()
        begins = what != self._what
        if begins:
            self._what, self._began = what, now
        text = _PHASES.get(what, _other)(what, done, total) + self._estimate(now, done, total)
        # The first compilation takes a minute or more and cannot be watched: a line after ten seconds comes too late.
        self._screen.status(text, at_once=begins and what == "kernels" and not kernels_are_cached())

    def _estimate(self, now: float, done: int, total: int) -> str:
        """The rest of this phase; kernels differ too much from each other for one."""
        elapsed = now - self._began
        if not 0 < done < total or elapsed < WORTH_AN_ESTIMATE_S or self._what == "kernels":
            return ""
        return f", about {duration(elapsed * (total - done) / done)} left"


def _kernels(_: str, done: int, total: int) -> str:
    return f"compiling kernels (first start only) {done}/{total}"


def _trunk(_: str, done: int, total: int) -> str:
    return f"loading trunk: layer {done} of {total}"


def _experts(_: str, done: int, total: int) -> str:
    return f"preparing experts: {done / GB:.2f} of {total / GB:.2f} GB"


def _other(what: str, done: int, total: int) -> str:
    return f"loading {what}: {done:,} of {total:,}"


_PHASES = {"kernels": _kernels, "trunk": _trunk, "experts": _experts}


class PromptStatus:
    """Shows how a prompt is being read, layer by layer when layers take long."""

    def __init__(self, screen: Screen, llm: LLM) -> None:
        self._screen = screen
        self._engine = llm.engine
        self._meter: PromptMeter | None = None

    def show(self, progress: PromptProgress) -> None:
        """Take the next event; the first one starts the clock."""
        from streamer.apps.prompt_meter import PromptMeter

        if self._meter is None:
            engine = self._engine
            self._meter = PromptMeter(progress.total, engine.prefill_chunk, engine.config.n_layers)
            engine.on_layer = self._layer
        self._meter.advance(progress.done)
        if self._meter.finished:
            self.finish()
        self._draw()

    def finish(self) -> None:
        """Stop watching: the first token is there, or there will be none. Idempotent."""
        self._engine.on_layer = None
        self._screen.clear_status()

    def _layer(self, layer: int) -> None:
        if self._meter is not None:
            self._meter.layer = layer
            self._draw()

    def _draw(self) -> None:
        """Nothing in the first second: what is quick needs no progress."""
        meter = self._meter
        if meter is None or meter.elapsed_s < 1.0 or meter.finished:
            return
        left = meter.remaining_s
        self._screen.status(
            f"reading the prompt: {meter.done:,} of {meter.total:,} tokens, layer {meter.layer} of {meter.n_layers}"
            + (f", about {duration(left)} left" if left is not None else "")
        )
