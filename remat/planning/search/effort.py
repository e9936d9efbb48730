"""Limits on the work of planning, with the benchmark by which each limit was set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Parameters of the search for candidates within a limit on the peak, for one measure of the peak.

    Attributes:
        prices: number of searches to run in the node order of the passes.
        orders: number of searches to run in other node orders, from a candidate near the limit.
        from_least: number of searches to run in other node orders, from the candidate with the least peak.
        share: edits of each search in other node orders, as a ratio of the usual number. Several short searches find
            cheaper candidates than a long search, because each starts from the best candidate so far.
        idle: searches in other node orders end after this many searches in a row find no cheaper candidate.
        above: a search in other node orders starts from a candidate of at most this multiple of the wanted peak.
        lowered: after a search in other node orders that finds nothing within the limit, its limit falls by this ratio
            of the wanted peak.
        negligible: other node orders are searched unless a candidate costs at most this ratio of the step's cost.
        lowest: number of searches to run for the least peak, each from the result of the previous search.
        lower: edits for each run of the schedule in one round of a search for the least peak. More edits lower the
            estimated peak of a ResNet, but not the simulated peaks of eight nets.
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
    lower: int = 350


#: For searches by the simulated peak, which is that of the schedule problem (benchmark ``peak-plans``).
SIMULATED = Rounds(orders=4, share=0.25, idle=1)
#: For searches by the estimated peak of fused code (benchmark ``compiled-peaks``). A candidate with node orders of its
#: own must cost less than others by `Rounds.negligible`: its layers are less alike, so Inductor compiles more kernels,
#: such as 40 instead of 26 for a Llama of four layers.
ESTIMATED = Rounds(
    prices=3, orders=5, from_least=2, share=0.17, negligible=0.002, lowest=2, lower=990
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """How many edits of a schedule a search over node orders tries (benchmark ``peak-plans``).

    Attributes:
        per_run: usual number of edits for each run of the schedule.
        most: most edits of one search.
        many: number of runs in a schedule above which a search tries fewer edits, because each edit takes longer.
        lower: most rounds of a search for the least peak.
        lower_most: most edits in one round of a search for the least peak.
    """

    per_run: int = 3_000
    most: int = 1_000_000
    many: int = 25_000
    lower: int = 3
    lower_most: int = 330_000

    def usual(self, runs: int, share: float) -> float:
        """Return ``share`` times the usual number of edits that a search tries on a schedule of ``runs`` runs."""
        return share * min(self.most, self.per_run * runs)

    def least(self, runs: int, per_run: int) -> int:
        """Return how many edits of a schedule of ``runs`` runs a search for the least peak tries in one round."""
        return min(self.lower_most, per_run * runs)

    def allowed(self, edits: float, runs: int) -> int:
        """Return how many of ``edits`` edits a search may try on a schedule of ``runs`` runs."""
        return int(edits * min(1.0, self.many / max(1, runs)) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllPeaks:
    """Limits on the work of the search for a frontier by peak (benchmark ``frontier``).

    Attributes:
        starts: about how many vertices of the hull the search starts from.
        simulated: plans of a frontier are simulated if their graphs together have at most this many nodes.
        to_least: parts of the range from the least peak to the lowest peak found; node orders are searched between
            parts.
        ordered: about how many points of the frontier searches over node orders start from.
        offloaded: number of peaks, approximately, at which offloading is tried.
        below: parts of the range from the least possible peak; offloading is tried between the parts.
        parts: parts of the range of peaks at which mixtures and additions aim.
        least: evaluations of decisions that save additional values, allowed on a graph of any size.
    """

    starts: int = 40
    simulated: int = 400_000
    to_least: int = 6
    ordered: int = 8
    offloaded: int = 12
    below: int = 4
    parts: int = 24
    least: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """Limits on the work of the search for values to offload (benchmark ``offloading``).

    Attributes:
        small: a value is left out if its bytes times this number are fewer than the bytes of all values.
        rounds: most rounds of the search; a round that exceeds the peak makes the next one aim lower by the excess.
        starts: about how many vertices of the hull a search starts from.
        share: ratio of the usual edits of a search over node orders, if a decision without offloads is known.
        above: searches start from decisions above the peak by these ratios of the bytes that the link sends in forward.
        reordered: number of decisions for which node orders are searched.
        placed: how many sets of values to offload a round may reject after splitting the graph.
        aimed: number of searches to run near an estimated peak.
        steps: the first search near an estimated peak is below the least simulated peak by at most this part of it.
    """

    small: int = 5_000
    rounds: int = 4
    starts: int = 4
    share: float = 0.5
    above: tuple[float, ...] = (0.9, 0.6)
    reordered: int = 2
    placed: int = 3
    aimed: int = 5
    steps: int = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """Limits on the work of the search for the decisions of several graphs of one step.

    Attributes:
        rounds: most iterations of a loop that approaches a limit on the peak of the step.
        low: number of decisions to try for the graph in which the step has its peak.
        searched: number of graphs, highest cost first, for which cheaper decisions are searched.
        shared: most iterations of the loop that distributes saved bytes over the graphs.
        combinations: about how many combinations of decisions are kept each time that a graph is added.
        parts: the runs of one graph are first divided into at most this many parts, each with its own plan.
        kinds: maximum number of different plans for the runs of one graph, because each plan is compiled.
    """

    parts: int = 16
    kinds: int = 4
    rounds: int = 8
    low: int = 6
    searched: int = 8
    combinations: int = 2_000
    shared: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """Parameters of the choice of candidates to compile (benchmark ``compiled-peaks``).

    Attributes:
        gap: neighbouring limits on saved bytes differ by at most this part of the largest limit.
        halvings: how often the intervals below and above the best limit on saved bytes are halved.
        far: compiled peaks are far above a limit if they exceed the limit by more than this part of the limit.
        margin: an estimated peak counts as within a budget if the peak is below the budget by this part of the budget.
        perhaps: the plan for budget 1 is compiled first if its estimated peak is at most this multiple of the budget.
        replans: how often a step is planned again because the compiled step exceeds its budget.
        of_ratio: how often a step is planned again under a ratio of the peak, which is met only approximately.
        nearly: a ratio of the peak is met if the compiled peak exceeds the ratio's bytes by at most this part of them.
        warned: the user is warned if the compiled peak is above a ratio's bytes by more than this part of these bytes.
    """

    gap: int = 16
    halvings: int = 2
    far: int = 10
    margin: int = 50
    perhaps: float = 1.05
    replans: int = 3
    of_ratio: int = 2
    nearly: int = 200
    warned: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEffort:
    """Limits on the work of the search for plans that fit a step into a rank's memory (benchmark ``fit``).

    Attributes:
        searches: most searches that aim at the bytes of a rank's memory.
        ratios: budgets as ratios of saved bytes to try if several ranks train, highest first.
        few_ratios: budgets as ratios of saved bytes whose decisions are candidates for every size of the memory.
        nodes: for other batch sizes, the range of peaks has as many parts as this number divided by the graph's nodes.
        parts: for other batch sizes, the fewest and the most parts into which the range of peaks is divided.
        part: the search for the largest batch ends if two batch sizes differ by at most this part of the batch.
        width: number of batch sizes to try at once on an executor that states no number of processes.
    """

    searches: int = 4
    ratios: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)
    few_ratios: tuple[float, ...] = (0.6, 0.3, 0.0)
    nodes: int = 2_000
    parts: tuple[int, int] = (2, 32)
    part: int = 50
    width: int = 4

    def peaks(self, nodes: int) -> int:
        """Return the number of parts into which to divide the range of peaks of a graph with ``nodes`` nodes."""
        least, most = self.parts
        return min(most, max(least, self.nodes // nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Aiming:
    """Parameters that decide when the loop in `remat.planning.search.aim` ends (benchmark ``compiled-peaks``).

    Attributes:
        lowered: a limit that is too high falls by at least this part of the wanted peak.
        close: two limits, one too low and one too high, are close if they differ by this part of the wanted peak.
        near: a peak is near enough if it is below the wanted peak by at most this ratio of the wanted peak.
    """

    lowered: int = 1_000
    close: int = 500
    near: float = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits on the work of a search; limits without a named benchmark were set by the benchmark ``peak-plans``.

    Attributes:
        work: evaluations of decisions in a search by prices, times the nodes of the graph.
        least: evaluations that a search by prices may make on a graph of any size.
        cuts: most minimum cuts of a search by prices: without checkpoints, and with checkpoints.
        segments: most segments into which checkpoints divide forward.
        draws: random changes, per value that may be saved, to bring a decision within the limits.
        misses: for fused code, saving more values ends after this many values in a row do not lower the cost.
        large: above this number of nodes in a graph, node orders are searched instead of values to save one by one.
        few: most runs of a step for which node orders are searched along a frontier (benchmark ``frontier``).
        small: most runs of a step for which a frontier includes the least peak (benchmark ``frontier``).
        vertices: about how many vertices of the hull a search starts from.
        steps: number of equal intervals of saved bytes; a frontier by saved bytes has a decision at each end.
        stretches: number of parts of backward; one node of each part gives a lower bound on the cost.
        bounds: number of intervals between the peaks at which lower bounds on the cost are computed.
        split: split graphs stay cached if they have at most this many nodes together.
        edits: limits on the edits of schedules.
        all_peaks: limits on the search for a frontier by peak.
        offloading: limits on the search for values to offload.
        several: limits on the search over several graphs of one step.
        compiling: parameters of the choice of candidates to compile.
        fitting: limits on the search for plans that fit a step into a rank's memory.
        aiming: parameters of the loop that aims at a peak.
        chunks: numbers of chunks of the loss that ``chunk="auto"`` compares.
        lower_surely: a plan's compiled peak is not estimated if its simulated peak times this is below that of budget
            1.
        lower: a search that finds nothing within a limit is repeated at these ratios of the limit, or at the first one
            alone if the graph has more than ``small`` nodes. At a lower limit, a search evaluates other decisions.
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
    vertices: int = 16
    steps: int = 24
    stretches: int = 12
    bounds: int = 64
    split: int = 20_000
    edits: Edits = Edits()
    all_peaks: AllPeaks = AllPeaks()
    offloading: Offloading = Offloading()
    several: Several = Several()
    compiling: Compiling = Compiling()
    fitting: FitEffort = FitEffort()
    aiming: Aiming = Aiming()
    chunks: tuple[int, ...] = (1, 2, 4, 8, 16)
    lower_surely: float = 1.25
    lower: tuple[float, ...] = (0.98, 0.99, 0.97, 0.95)

    def evaluations(self, nodes: int, least: int | None = None) -> int:
        """Return how many decisions a search may evaluate on a graph of ``nodes`` nodes; this is at least ``least``."""
        return max(self.least if least is None else least, self.work // max(1, nodes))


#: The effort of a search, unless a caller gives another effort.
DEFAULT = Effort()
