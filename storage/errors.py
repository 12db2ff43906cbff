"""The exceptions of this leaf. streamer's command line shows them like its own errors: one sentence, exit code 2."""

from collections.abc import Sequence


class StorageError(Exception):
    """A file is missing, short, malformed or unreadable; the text names path, offset, expected and found."""


class DirectReadRefusedError(StorageError):
    """A file system that had served O_DIRECT reads refused one: that file wants to be opened and tested again."""


class CheckpointError(StorageError):
    """The files of a checkpoint do not hold what the configuration implies; found before any weight is read.

    `problems` has one entry a kind of problem, already summarised for a person; the text shows at most MAX_SHOWN.
    """

    MAX_SHOWN = 16

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = [f"  - {problem}" for problem in self.problems[: self.MAX_SHOWN]]
        if len(self.problems) > self.MAX_SHOWN:
            shown.append(f"  - and {len(self.problems) - self.MAX_SHOWN} more")
        super().__init__("\n".join([f"the checkpoint in {where} is not usable:", *shown]))
