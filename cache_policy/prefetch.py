"""Which predicted reads are worth a drive's time: admitted per layer and rank while their measured precision pays.

A prediction is a list of experts in the rank order of the router that made it. Every prediction is judged, admitted or
not, so a rank that was shut out comes back when it improves (caching.md §4: rank 1 of a K3 router hits nine times of
ten, rank 16 one time of four; a wrong read pays for itself only while nothing else wants the drive).
"""

from collections.abc import Collection, Sequence

THRESHOLD = 0.5  # break-even lies near 0.6 where a wrong read displaces a demand read, lower on an idle drive
PRIOR = 0.6  # of a rank not judged yet: admitted
WEIGHT = 0.05  # of the newest judgement in the running mean: some twenty tokens of memory


class PrefetchGate:
    """Running precision of predictions by layer and predicted rank, and the decision that follows from it."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self.threshold = threshold
        self._precision: dict[int, list[float]] = {}  # layer → by rank
        self._judged: dict[int, list[tuple[int, int]]] = {}  # layer → by rank: (right, judged)

    def admitted(self, layer: int, ranked: Sequence[int]) -> list[int]:
        """Return the experts of a prediction for `layer` that are worth reading, best rank first."""
        precision = self._ranks(layer, len(ranked))
        return [expert for rank, expert in enumerate(ranked) if precision[rank] >= self.threshold]

    def judge(self, layer: int, ranked: Sequence[int], wanted: Collection[int]) -> None:
        """Compare a prediction for `layer` with what its router then chose."""
        precision = self._ranks(layer, len(ranked))
        judged = self._judged[layer]
        for rank, expert in enumerate(ranked):
            right = expert in wanted
            precision[rank] += WEIGHT * (right - precision[rank])
            hits, count = judged[rank]
            judged[rank] = (hits + right, count + 1)

    def precision(self) -> dict[int, list[float]]:
        """Return layer → share of right predictions by rank, over everything judged."""
        return {
            layer: [right / count if count else 0.0 for right, count in ranks] for layer, ranks in self._judged.items()
        }

    def _ranks(self, layer: int, n_ranks: int) -> list[float]:
        precision = self._precision.setdefault(layer, [])
        judged = self._judged.setdefault(layer, [])
        missing = n_ranks - len(precision)
        precision.extend([PRIOR] * missing)
        judged.extend([(0, 0)] * missing)
        return precision
