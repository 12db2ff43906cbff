"""What this leaf needs to know of a model's routed experts: a name pattern and six shapes, not half a million names."""

import re
from typing import Protocol


class ExpertLayout(Protocol):
    """Names and shapes of the routed experts; `parts` are (name, shape) in canonical order, all of dtype U8."""

    @property
    def template(self) -> str:
        """Tensor name with the fields {layer}, {expert} and {part}."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have experts, ascending."""

    @property
    def n_experts(self) -> int:
        """Experts of each layer."""

    @property
    def parts(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """The tensors of one expert."""


def part_bytes(layout: ExpertLayout) -> tuple[int, ...]:
    """Return the bytes of each part of one expert."""
    return tuple(rows * columns for _, (rows, columns) in layout.parts)


def name_pattern(layout: ExpertLayout) -> re.Pattern[str]:
    """Return a pattern whose groups are layer, expert and part name of an expert tensor."""
    number = "(0|[1-9][0-9]*)"
    parts = "|".join(re.escape(name) for name, _ in layout.parts)
    text = re.escape(layout.template)
    fields = {"layer": number, "expert": number, "part": f"({parts})"}
    for field, pattern in fields.items():
        text = text.replace(re.escape("{" + field + "}"), pattern)
    return re.compile(text)
