"""Consoles for tables: no colour and no control codes where the output is piped or colour is unwanted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from streamer.config.load import no_color

if TYPE_CHECKING:
    from rich.console import Console


def output_console() -> Console:
    """Return a console on standard output; markup is off because file names contain brackets."""
    from rich.console import Console

    return Console(file=sys.stdout, no_color=no_color(), markup=False, highlight=False, emoji=False)
