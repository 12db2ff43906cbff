"""What a checkpoint is and where its bytes go: configuration, census by component, problems.

Data only: the command line renders it. Reads headers, no weight.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.preflight import PreflightReport, preflight
from streamer.config.load import load_model_config
from streamer.config.model import ModelConfig
from streamer.config.tensors import (
    COMPONENTS,
    VISION_COMPONENTS,
    VISION_PREFIXES,
    component,
    expert_tensors,
    trunk_tensors,
)


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """One row of the census: what was found in the headers, bytes as stored."""

    key: str
    label: str
    n_tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """One checkpoint. Byte counts are of the tensors found; `trunk_parameters` leaves out experts and vision.

    `layer_kinds[L]` is attention + feed-forward of layer L, as in 'kda+moe'. With `problems` it cannot be run.
    """

    directories: tuple[str, ...]
    config: ModelConfig
    layer_kinds: tuple[str, ...]
    components: tuple[ComponentBytes, ...]
    n_shards: int
    n_shards_expected: int
    n_tensors: int
    tensor_bytes: int
    n_experts: int
    expert_bytes: int
    trunk_parameters: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types, under the field names."""
        return asdict(self)


def inspect(directories: Sequence[Path]) -> InspectReport:
    """Check the checkpoint in `directories` and count its bytes.

    Raises ConfigError where config.json does not describe a runnable model; problems of the shards are in the report.
    """
    config = load_model_config(directories)
    checked = preflight(directories, trunk_tensors(config), expert_tensors(config), VISION_PREFIXES)
    table = checked.table
    return InspectReport(
        directories=tuple(str(directory) for directory in directories),
        config=config,
        layer_kinds=tuple(_layer_kind(config, layer) for layer in range(config.n_layers)),
        components=tuple(_census(config, checked)),
        n_shards=len(table.shards),
        n_shards_expected=checked.n_shards_expected,
        n_tensors=table.n_tensors,
        tensor_bytes=table.tensor_bytes,
        n_experts=table.n_complete_experts,
        expert_bytes=expert_tensors(config).expert_bytes,
        trunk_parameters=_trunk_parameters(config, checked),
        problems=tuple(checked.problems),
        warnings=tuple(checked.warnings),
    )


def _layer_kind(config: ModelConfig, layer: int) -> str:
    return f"{'mla' if config.is_mla(layer) else 'kda'}+{'moe' if config.is_moe(layer) else 'dense'}"


def _census(config: ModelConfig, checked: PreflightReport) -> list[ComponentBytes]:
    counts, nbytes = Counter[str](), Counter[str]()
    for name, entry in checked.table.trunk.items():
        key = component(name, config)
        counts[key] += 1
        nbytes[key] += entry.nbytes
    layout = expert_tensors(config)
    found = checked.table.found_parts()
    counts["experts"] = sum(found)
    nbytes["experts"] = sum(n * rows * columns for n, (_, (rows, columns)) in zip(found, layout.parts, strict=True))
    return [ComponentBytes(key, label, counts[key], nbytes[key]) for key, label in COMPONENTS.items() if counts[key]]


def _trunk_parameters(config: ModelConfig, checked: PreflightReport) -> int:
    entries = checked.table.trunk.items()
    return sum(math.prod(entry.shape) for name, entry in entries if component(name, config) not in VISION_COMPONENTS)
