"""How much work a search may take: one record of numbers, with the benchmark that set each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How a search closes in on a peak by one measure.

    Attributes:
        prices: searches in the node order of the passes.
        orders: searches in other node orders, from a candidate near the limit.
        from_least: the same from the candidate with the least peak.
        share: edits of each search in other node orders, as a ratio of the usual number.
        idle: searches in other node orders in a row that find nothing cheaper, before they end.
        above: such a search starts from a candidate of at most this multiple of the wanted peak.
        lowered: after each miss, the limit of such a search falls by this ratio of the wanted peak.
        negligible: other node orders are searched if no candidate costs at most this ratio of the step's cost.
        lowest: searches for the least peak, each from the result of the one before.
    """

    prices: int = 1
    orders: int = 1
    from_least: int = 0
    share: float = 1.0
    idle: int = 3
    above: float = 1.02
    lowered: float = 0.01
    negligible: float = 0.0
    lowest: int = 1


#: By the simulated peak, which is that of the step problem (benchmark ``peak-plans``).
SIMULATED = Rounds()
#: By the estimated peak of fused code (benchmark ``compiled-peaks``). A candidate with node orders of its own must cost
#: less than others by `Rounds.negligible`: its layers are less alike, so Inductor compiles more kernels, such as 40
#: instead of 26 for a Llama of four layers.
ESTIMATED = Rounds(prices=3, orders=5, from_least=2, share=0.17, negligible=0.002, lowest=2)


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
        slack: if the peak of the cheapest candidate is below this ratio of the limit, the solver is asked, too.
        lower: a search that finds nothing within a limit is repeated at these ratios of the limit, or at the first one
            alone if the graph has more than ``small`` nodes. A lower limit leads the search past other decisions.
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
    slack: float = 0.97
    lower: tuple[float, ...] = (0.98, 0.99, 0.97, 0.95)

    def evaluations(self, nodes: int) -> int:
        """Return how many decisions a search on a graph of so many nodes may evaluate."""
        return max(self.least, self.work // max(1, nodes))


#: The effort of a search, unless a caller gives another.
DEFAULT = Effort()
