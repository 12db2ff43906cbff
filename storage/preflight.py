"""Checks a whole checkpoint before any weight is read: index, files, headers and the expected tensors, each way.

What is wrong is summarised for a person: which shards, what they hold, by how much a file is short, what to do.
A shard that is silently absent or short gives a server that boots and answers garbage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from storage import describe
from storage.errors import CheckpointError, StorageError
from storage.expert_layout import ExpertLayout
from storage.safetensors_index import Kind, ShardHeader, read_header
from storage.shard_files import INDEX_NAME, ShardFiles, WeightIndex, find_shards, read_index
from storage.tensor_table import TensorTable

STALE_INDEX = f"{INDEX_NAME} and the shards are of different revisions; fetch both again"


@dataclass(slots=True)
class PreflightReport:
    """What the headers say. `problems` forbid running, `warnings` do not; each entry is one summarised kind."""

    directories: tuple[Path, ...]
    table: TensorTable
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    n_shards_expected: int = 0

    def check(self) -> None:
        """Raise CheckpointError where there are problems."""
        if self.problems:
            raise CheckpointError(describe.places(self.directories), self.problems)


def preflight(
    directories: Sequence[Path],
    trunk: Mapping[str, Kind],
    experts: ExpertLayout,
    optional_prefixes: tuple[str, ...] = (),
) -> PreflightReport:
    """Compare index, files and headers with `trunk` (name → (dtype, shape)) and `experts`; read no weight.

    Tensors whose names begin with `optional_prefixes` may be absent, or present unexpectedly: that is a warning.
    Raises StorageError where a directory cannot be listed.
    """
    report = PreflightReport(tuple(directories), TensorTable(trunk, experts))
    _Preflight(report, find_shards(directories), optional_prefixes).run()
    return report


class _Preflight:
    """One run; `claimed` shrinks to the index entries that no header has confirmed."""

    def __init__(self, report: PreflightReport, files: ShardFiles, optional_prefixes: tuple[str, ...]) -> None:
        self.report = report
        self.files = files
        self.optional = optional_prefixes
        self.no_index = False
        self.index = self._read_index()
        self.claimed: dict[str, str] = dict(self.index.weight_map) if self.index else {}
        self.absent: list[str] = []
        self.unusable: dict[str, str] = {}
        self.short: list[str] = []
        self.sparse: list[str] = []
        self.moved: list[str] = []
        self.unclaimed: list[str] = []
        self.gaps = 0

    @property
    def gone(self) -> set[str]:
        """Shards whose tensors cannot be known: absent, or not readable as safetensors."""
        return {*self.absent, *self.unusable}

    def _read_index(self) -> WeightIndex | None:
        try:
            index = read_index(self.report.directories)
            self.no_index = index is None
            return index
        except StorageError as error:
            self.report.problems.append(str(error))
            return None

    def run(self) -> None:
        """Read every header, then say what does not fit; shards that are absent explain the tensors that are."""
        for name in self._shard_names():
            self._read_shard(name)
        missing = list(self.report.table.missing())
        self._report_absent(missing)
        self._report_unusable()
        self._report_unfinished()
        self._report_missing(missing)
        self._report_differences()
        self._report_index()
        self._report_warnings()

    def _shard_names(self) -> list[str]:
        """Return the shards to read: those the index names, else all that are there; note the absent ones."""
        present = self.files.paths
        if self.index is not None:
            names = set(self.claimed.values())
            extra = sorted(set(present) - names)
            if extra:
                self.report.warnings.append(f"not named by {INDEX_NAME}, ignored: {describe.shards(extra)}")
        else:
            names = {*present, *describe.absent_from_numbering(present)}
        self.report.n_shards_expected = len(names)
        self.absent = sorted(names - set(present))
        if not present:
            where = describe.places(self.report.directories)
            self.report.problems.append(f"no *.safetensors file in {where}; expected the shards as downloaded")
        return sorted(names & set(present))

    def _read_shard(self, name: str) -> None:
        try:
            header = read_header(self.files.paths[name])
        except StorageError as error:
            self.unusable[name] = str(error)
            return
        self._check_size(header)
        self.gaps += header.gap_bytes
        self.report.table.add(header)
        if self.index is not None:
            self._check_claims(name, header)

    def _check_size(self, header: ShardHeader) -> None:
        allocated = header.path.stat().st_blocks * 512
        # Weights do not compress by half, so a compressing file system is not mistaken for holes; some report 0.
        if 0 < allocated < header.file_bytes // 2:
            self.sparse.append(header.path.name)
        short = header.expected_bytes - header.file_bytes
        if short:
            self.short.append(
                f"{header.path.name} has {header.file_bytes:,} of {header.expected_bytes:,} bytes ({short:,} missing)"
                if short > 0
                else f"{header.path.name} has {-short:,} bytes more than the {header.expected_bytes:,} its header says"
            )

    def _check_claims(self, shard: str, header: ShardHeader) -> None:
        for name in header.names:
            claim = self.claimed.get(name)
            if claim == shard:
                del self.claimed[name]
            elif claim is not None:
                self.moved.append(f"{name} is in {shard}, not in {claim}")
            else:
                self.unclaimed.append(name)

    def _report_absent(self, missing: Sequence[str]) -> None:
        if not self.absent:
            return
        gone = set(self.absent)
        held = [name for name, shard in self.claimed.items() if shard in gone] if self.index else list(missing)
        holds = f": {describe.tensors(held)}" if held else ""
        text = f"{describe.shards(self.absent)} absent{holds}"
        if held and all(name.startswith(self.optional) for name in held):
            self.report.warnings.append(f"{text}; needed for images only")
            return
        names = describe.shorten(self.absent, limit=4)
        self.report.problems.append(f"{text}. Resume the download (the same command continues it) of {names}")

    def _report_unusable(self) -> None:
        names = list(self.unusable)
        self.report.problems += [self.unusable[name] for name in names[: describe.MAX_NAMED]]
        others = names[describe.MAX_NAMED :]
        if others:
            text = f"{len(others)} more files are not usable as safetensors: {describe.shards(others)}"
            self.report.problems.append(text)
        held = [name for name, shard in self.claimed.items() if shard in self.unusable] if names else []
        if held:
            self.report.problems.append(f"the unusable files hold {describe.tensors(held)}")

    def _report_unfinished(self) -> None:
        if self.short:
            text = describe.shorten(self.short, limit=5)
            self.report.problems.append(f"wrong file size: {text}. Resume the download, or delete and fetch again")
        if self.files.unfinished:
            names = describe.shards(sorted(set(self.files.unfinished)))
            self.report.problems.append(f"the download of {names} is not finished (its partial-download file is there)")

    def _report_missing(self, missing: Sequence[str]) -> None:
        """Report expected tensors that are nowhere, except those that the index places: see _report_index."""
        if self.index is None and self.gone:
            return  # without an index, the absent shards account for them
        names = [name for name in missing if name not in self.claimed]
        optional = [name for name in names if name.startswith(self.optional)]
        if optional:
            self.report.warnings.append(f"missing, needed for images only: {describe.tensors(optional)}")
        needed = [name for name in names if not name.startswith(self.optional)]
        if needed:
            text = f"tensors that config.json implies are missing: {describe.tensors(needed)}"
            self.report.problems.append(f"{text}. The conversion is incomplete, or config.json is of another model")

    def _report_differences(self) -> None:
        problems, differences = self.report.problems, self.report.table.differences
        unexpected = [name for name in differences.unexpected if not name.startswith(self.optional)]
        if len(unexpected) < len(differences.unexpected):
            self.report.warnings.append("tensors of a vision tower that config.json does not describe are ignored")
        if unexpected:
            text = f"tensors that config.json does not imply: {describe.tensors(unexpected)}"
            problems.append(f"{text}. The shards are of another model, or renamed by a conversion")
        if differences.wrong:
            text = describe.shorten(differences.wrong)
            problems.append(f"wrong dtype or shape: {text}. config.json and the shards are not of the same model")
        if differences.twice:
            problems.append(f"held by two shards: {describe.tensors(differences.twice)}. Remove the foreign file")
        split = self.report.table.split_experts()
        if split:
            layer, expert = split[0]
            problems.append(
                f"{len(split):,} experts are split over several files (first: layer {layer}, expert {expert}); "
                "expected all six tensors of an expert in one shard, as released"
            )

    def _report_index(self) -> None:
        if self.index is None:
            return
        gone, unexpected = self.gone, set(self.report.table.differences.unexpected)
        moved = {text.split(" is in ", 1)[0] for text in self.moved}
        stale = [name for name, shard in self.claimed.items() if shard not in gone and name not in moved]
        if self.moved:
            self.report.problems.append(
                f"not in the shard that the index says: {describe.shorten(self.moved)}. {STALE_INDEX}"
            )
        if stale:
            text = f"named by the index but not in their shard: {describe.tensors(stale)}"
            self.report.problems.append(f"{text}. {STALE_INDEX}")
        unclaimed = [name for name in self.unclaimed if name not in unexpected]
        if unclaimed:
            text = f"in a shard but not in the index: {describe.tensors(unclaimed)}"
            self.report.problems.append(f"{text}. {STALE_INDEX}")

    def _report_warnings(self) -> None:
        warnings, table = self.report.warnings, self.report.table
        if self.files.differing:
            text = describe.shorten(self.files.differing)
            warnings.append(f"copies of a shard differ in size: {text}. Remove the copy that is not wanted")
        if self.no_index and len(self.files.paths) > 1:
            warnings.append(f"{INDEX_NAME} is absent; the headers and config.json were compared without it")
        if self.index is not None and self.index.total_bytes not in {None, table.tensor_bytes} and not self.absent:
            total = self.index.total_bytes
            warnings.append(f"{INDEX_NAME} says {total:,} bytes of tensors, the headers {table.tensor_bytes:,}")
        if self.sparse:
            text = f"{describe.shards(self.sparse)} occupy less than half of their size on disk"
            warnings.append(f"{text}: holes that read as zeros, unless the file system compresses. Was it all written?")
        if self.gaps:
            warnings.append(f"{self.gaps:,} bytes inside the shards belong to no tensor")
