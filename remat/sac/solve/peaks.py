"""The memory of a step under a decision, at each program point (moment)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat.sac.estimation.calls import CallStats
from remat.sac.estimation.modules import ModuleTree
from remat.sac.estimation.stats import SACStats
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice

#: A decision: module to its choice.
Decision = Mapping[int, ModuleChoice]
#: Sets of stored operators; see `stored_sets`.
Stored = Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """The memory of a step in which modules are checkpointed.

    Attributes:
        memory: bytes alive by moment, while nothing runs again.
        reruns: bytes at the peak while a module runs again, by module and call.
        peak_bytes: most of all of them.
    """

    memory: Ints
    reruns: dict[tuple[int, int], int]
    peak_bytes: int


def simulate(tree: ModuleTree, decision: Decision, plain: Ints) -> Simulated:
    """Simulate a step in which some modules are checkpointed.

    From the end of its forward to the start of its backward, a module keeps what it stores and its
    inputs. Then it runs again, and has back everything that backward reads. The state of the generator
    is kept from the start of its forward to the end of its backward.

    Args:
        tree: the modules.
        decision: module to what is chosen for it.
        plain: bytes alive by moment without checkpointing.
    """
    memory = plain.copy()
    reruns = {}
    for k, choice in decision.items():
        stats, calls = tree.modules[k].operators, tree.modules[k].calls
        stored = stored_sets(stats, [choice])
        for i, call in enumerate(calls):
            forward = np.arange(call.begin, call.end)
            memory[forward] += held_longer(call, stats, stored, forward)[0]
            memory[call.end : call.back + 1] += choice.kept_bytes - call.freeable_bytes
            memory[call.begin : call.back_end + 1] += tree.state_bytes
            # The state from before it runs again is kept beside that of its forward.
            own = int(rerun_peaks(call, stats, stored)[0]) + tree.state_bytes
            reruns[k, i] = own - choice.kept_bytes
    for k, i in reruns:
        reruns[k, i] += int(memory[tree.modules[k].calls[i].back])
    peak = max([int(memory.max(initial=0)), *reruns.values()])
    return Simulated(memory=memory, reruns=reruns, peak_bytes=peak)


def rerun_peaks(call: CallStats, stats: SACStats, stored: Stored) -> Ints:
    """Most bytes alive of a module's own while it runs again, for each set of stored operators.

    Stored results wait for their operator; everything else is as in forward.
    """
    nbytes = stored * np.array(stats.memory, dtype=np.int64)
    ran = np.zeros((len(stored), call.end - call.begin), dtype=np.int64)
    ran[:, [made - call.begin for made, _ in call.freed_at]] = nbytes
    waiting = nbytes.sum(axis=1, keepdims=True) - np.cumsum(ran, axis=1)
    peaks: Ints = (call.made + waiting).max(axis=1, initial=0)
    return peaks


def held_longer(call: CallStats, stats: SACStats, stored: Stored, moments: Ints) -> Ints:
    """Bytes at moments of a call's forward that are alive only because they are stored.

    Returns:
        A row for each set of stored operators, a column for each moment.
    """
    freed = np.array([died for _, died in call.freed_at], dtype=np.int64)
    order = np.argsort(freed, kind="stable")
    nbytes = stored * np.array(stats.memory, dtype=np.int64)
    held = np.cumsum(np.pad(nbytes[:, order], ((0, 0), (1, 0))), axis=1)
    found: Ints = held[:, np.searchsorted(freed[order], moments, side="right")]
    return found


def stored_sets(stats: SACStats, choices: Sequence[ModuleChoice]) -> Stored:
    """What choices store: a row for each choice, a column for each operator; 1 if it is stored."""
    found = np.zeros((len(choices), len(stats)), dtype=np.int64)
    for row, choice in zip(found, choices, strict=True):
        row[list(choice.stored)] = 1
    return found
