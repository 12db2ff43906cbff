"""`streamer inspect`: renders what `streamer.apps.inspect` found."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streamer.cli.console import output_console
from streamer.cli.options import JSON, MODEL, MODEL_DIR, model_directories
from streamer.config.errors import StreamerError

if TYPE_CHECKING:
    from rich.table import Table

    from streamer.apps.inspect import InspectReport

GB = 1e9
NARROW_COLUMNS = 64  # below this the census leaves out the exact byte counts


def inspect_command(model: Path | None = MODEL, model_dir: list[Path] | None = MODEL_DIR, as_json: bool = JSON) -> None:
    """Check a checkpoint without reading its weights; show what it is and where the bytes go."""
    from storage.errors import CheckpointError, StorageError
    from streamer.apps.inspect import inspect

    try:
        report = inspect(model_directories(model, model_dir))
    except (StreamerError, StorageError) as error:
        if not as_json:
            raise
        _print_json({"problems": [str(error)]})
        raise typer.Exit(2) from error
    if as_json:
        _print_json(report.to_dict())
        raise typer.Exit(2 if report.problems else 0)
    if report.problems:
        raise CheckpointError(" + ".join(report.directories), report.problems)
    _render(report)


def _print_json(value: dict[str, Any]) -> None:
    # Escaped to ASCII: a path may hold bytes that are not UTF-8, and every JSON reader understands the escapes.
    print(json.dumps(value, indent=2))


def _render(report: InspectReport) -> None:
    console = output_console()
    console.print(_summary(report))
    console.print(_census(report, exact=console.width >= NARROW_COLUMNS))
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _table(*columns: str, numeric_from: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= numeric_from else "left", overflow="fold")
    return table


def _summary(report: InspectReport) -> Table:
    config = report.config
    rows = {
        "model": " + ".join(report.directories),
        "shards": f"{report.n_shards}, {report.n_tensors:,} tensors, {report.tensor_bytes:,} bytes",
        "layers": f"{config.n_layers}: {_layer_runs(report.layer_kinds)}",
        "width": f"hidden {config.hidden_size:,}, latent {config.moe.latent_size:,}, vocabulary {config.vocab_size:,}",
        "experts": f"{report.n_experts:,} of {report.expert_bytes:,} bytes, "
        f"{config.moe.top_k} of {config.moe.n_experts} per token and layer",
        "trunk": f"{report.trunk_parameters:,} parameters",
        "context": f"{config.max_position_embeddings:,} tokens",
        "vision": "yes" if config.has_vision else "no",
    }
    table = _table("", "", numeric_from=2)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _layer_runs(kinds: tuple[str, ...]) -> str:
    """Return '1 kda+dense, 2 kda+moe, 1 mla+moe, …' shortened to totals where it would be long."""
    runs = [f"{sum(1 for _ in run)} {kind}" for kind, run in groupby(kinds)]
    if len(runs) <= 8:
        return ", ".join(runs)
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _census(report: InspectReport, *, exact: bool) -> Table:
    table = _table("component", "tensors", *(["bytes"] if exact else []), "GB", numeric_from=1)
    rows = [(row.label, row.n_tensors, row.nbytes) for row in report.components]
    for label, n_tensors, nbytes in [*rows, ("all", report.n_tensors, report.tensor_bytes)]:
        table.add_row(label, f"{n_tensors:,}", *([f"{nbytes:,}"] if exact else []), f"{nbytes / GB:,.2f}")
    return table
