"""How much work a search may take: one record of numbers, with the benchmark that set each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers that limit the work of a search. The benchmark ``peak-plans`` set all of them, unless noted.

    Attributes:
        work: evaluations of decisions in a search by prices, times the nodes of the graph.
        least: evaluations that such a search may make on a graph of any size.
        cuts: most minimum cuts of a search by prices: without checkpoints, and with checkpoints.
        segments: most segments into which checkpoints divide forward.
        draws: random changes that a repair tries for each value that may be saved.
        misses: values that filling tries in a row in vain, if the step problem is that of fused code.
        large: nodes of a graph above which node orders are searched instead of filling.
        few: runs of a step up to which node orders are searched all along a frontier (benchmark ``frontier``).
        small: runs of a step up to which a frontier includes the least peak (benchmark ``frontier``).
    """

    work: int = 800_000
    least: int = 120
    cuts: tuple[int, int] = (40, 20)
    segments: int = 256
    draws: int = 4
    misses: int = 6
    large: int = 2_000
    few: int = 1_000
    small: int = 2_000

    def evaluations(self, nodes: int) -> int:
        """Return how many decisions a search on a graph of so many nodes may evaluate."""
        return max(self.least, self.work // max(1, nodes))


#: The effort of a search, unless a caller gives another.
DEFAULT = Effort()
