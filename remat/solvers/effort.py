"""Define the limits on the work of remat's own solvers, and state the reason for each limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverEffort:
    """Limits on the work of remat's solvers, chosen with the benchmarks ``solvers`` and ``plan-quality`` unless noted.

    Attributes:
        states: most states (partial choices of items) that one search of a knapsack may create in total.
        states_kept: most states that one search of a knapsack keeps at one time, in at most 100 MB.
        table_cells: largest table for dynamic programming, in cells: items times capacity. Filling this table takes well
            under a second.
        items: largest number of items for CP-SAT and HiGHS. With more items, both take over 100 MB and prove nothing.
        turns: for each round on a graph problem: the number of prefixes (partial decisions) that the beam search keeps,
            and an amount of work in the kernel's units. The kernel's exact enumeration may do twice the round's amount
            of work, and HiGHS ten times or more. A hundred million units take the kernel one to three seconds.
        long_turn: the two limits of one more round, which runs only on graphs of more than ``large`` nodes.
        large: number of nodes above which a graph gets the additional round of ``long_turn``.
        root_work: work of HiGHS at the root of its search tree, in the kernel's units, for each node and edge of the
            graph. Each further tree node takes about an eighth.
        beam: number of prefixes that a beam search keeps after each node.
        beam_losses: largest loss of a prefix in the first and in the second beam search, as a fraction of the bound.
        gap: gap between cost and lower bound at which a search ends, as a fraction of the cost.
        small: most nodes of a reduced problem that is searched to a gap of zero.
        small_work: most work of a search to a gap of zero, in the kernel's units. The search takes milliseconds.
        rounds: most knapsacks that are solved one after another for one graph problem. The capacity grows from one
            knapsack to the next by the bytes that the minimum cut left unused.
        moves: edits of a schedule in one annealing search, for each node of the problem (benchmark ``schedules``).
        most_moves: most edits of a schedule in one annealing search (benchmark ``schedules``).
        schedule_nodes: largest schedule problem for CP-SAT. Its model grows fast: an edge between two nodes that may run
            twice has four variables, one for each pair of runs.
        verify_work: work of the search that checks a plugin's claimed bound. The search takes hundredths of a second,
            and proves the bound of nearly all problems with a few hundred items.
        verify_states: most states that the search that checks a plugin's claimed bound keeps at one time.
        offload_work: a search for values to offload ends after ``offload_least`` evaluations of schedules, but not before
            the evaluated schedules have ``offload_work`` runs in total (benchmark ``offloading``).
        offload_least: number of schedules that a search for values to offload may evaluate in any case.
        offload_around: fraction of ``offload_work`` for a search that changes only the offloaded values.
        offload_mends: most values that one change of a decision tries to offload, and to recompute.
        offload_improved: number of decisions, the best of those found, from which local searches start.
        points: most points of a knapsack's frontier. A frontier with more is thinned to at most half of ``points``.
    """

    states: int = 400_000_000
    states_kept: int = 400_000
    table_cells: int = 50_000_000
    items: int = 3_000
    turns: tuple[tuple[int, int], ...] = ((500, 200_000), (1_500, 1_000_000), (3_000, 3_000_000))
    long_turn: tuple[int, int] = (4_000, 30_000_000)
    large: int = 1_000
    root_work: int = 12_000
    beam: int = 4_000
    beam_losses: tuple[float, ...] = (0.002, 0.01)
    gap: float = 0.001
    small: int = 500
    small_work: int = 1_000_000
    rounds: int = 4
    moves: int = 15_000
    most_moves: int = 5_000_000
    schedule_nodes: int = 300
    verify_work: int = 2_000_000
    verify_states: int = 50_000
    offload_work: int = 1_500_000
    offload_least: int = 250
    offload_around: float = 0.2
    offload_mends: int = 12
    offload_improved: int = 2
    points: int = 200_000


#: The limits that remat's own solvers use.
EFFORT = SolverEffort()
