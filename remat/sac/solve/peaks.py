"""Simulated memory, at each moment, of a step in which some modules are checkpointed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat.sac.estimation.calls import CallStats
from remat.sac.estimation.modules import ModuleTree
from remat.sac.estimation.stats import SACStats
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice

#: A decision: dict from the position of each checkpointed module to its choice.
Decision = Mapping[int, ModuleChoice]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """Simulated memory of a step in which modules are checkpointed.

    Attributes:
        memory: bytes alive at each moment, without the bytes that recomputation allocates.
        reruns: dict from (position of a module, position of one of the module's calls) to the peak
            bytes of the step while this call is recomputed.
        peak_bytes: peak of the step, the maximum of ``memory`` and ``reruns``.
    """

    memory: Ints
    reruns: dict[tuple[int, int], int]
    peak_bytes: int


def simulate(tree: ModuleTree, decision: Decision, plain: Ints) -> Simulated:
    """Simulate the memory of a step in which some modules are checkpointed.

    A checkpointed module keeps its stored results and its inputs from the end of its forward to the
    start of its backward. Then the module runs again and makes the other tensors that its backward
    reads. From the start of the module's forward to the end of its backward, PyTorch also keeps the
    random generator's state.

    Args:
        tree: the modules.
        decision: dict from the position of each checkpointed module to its choice.
        plain: bytes alive at each moment without checkpointing.
    """
    memory = plain.copy()
    reruns = {}
    for k, choice in decision.items():
        stored = stored_bytes(tree.modules[k].operators, [choice])
        for i, call in enumerate(tree.modules[k].calls):
            forward = np.arange(call.begin, call.end)
            memory[forward] += held_longer(call, stored, forward)[0]
            memory[call.end : call.back + 1] += choice.kept_bytes - call.freeable_bytes
            memory[call.begin : call.back_end + 1] += tree.state_bytes
            # For a rerun, PyTorch keeps the generator's current state beside its state in forward.
            own = int(rerun_peaks(call, stored)[0]) + tree.state_bytes
            # `memory` contains the stored results already.
            reruns[k, i] = own - choice.kept_bytes
    # `memory` is added last, because its value at a rerun depends on the decisions for all modules.
    for k, i in reruns:
        reruns[k, i] += int(memory[tree.modules[k].calls[i].back])
    peak = max([int(memory.max(initial=0)), *reruns.values()])
    return Simulated(memory=memory, reruns=reruns, peak_bytes=peak)


def rerun_peaks(call: CallStats, stored: Ints) -> Ints:
    """Return, for each set of stored results, the peak bytes of a module's storages in recomputation.

    A stored result is alive from the start of recomputation on. Recomputation allocates and frees
    all other storages as forward does.

    Args:
        call: the module call that runs again.
        stored: bytes of the stored results, from `stored_bytes`, with one row for each set.
    """
    ran = np.zeros((len(stored), call.end - call.begin), dtype=np.int64)
    ran[:, [made - call.begin for made, _ in call.freed_at]] = stored
    waiting = stored.sum(axis=1, keepdims=True) - np.cumsum(ran, axis=1)
    peaks: Ints = (call.made + waiting).max(axis=1, initial=0)
    return peaks


def held_longer(call: CallStats, stored: Ints, moments: Ints) -> Ints:
    """Return the bytes of results that are alive in a call's forward only because they are stored.

    Args:
        call: the module call.
        stored: bytes of the stored results, from `stored_bytes`, with one row for each set.
        moments: moments of the call's forward for which the bytes are returned.

    Returns:
        Matrix of bytes, with a row for each set and a column for each moment.
    """
    freed = np.array([died for _, died in call.freed_at], dtype=np.int64)
    order = np.argsort(freed, kind="stable")
    held = np.cumsum(np.pad(stored[:, order], ((0, 0), (1, 0))), axis=1)
    found: Ints = held[:, np.searchsorted(freed[order], moments, side="right")]
    return found


def stored_bytes(stats: SACStats, choices: Sequence[ModuleChoice]) -> Ints:
    """Return a matrix of bytes with a row per choice and a column per operator; 0 for a result that is not stored."""
    found = np.zeros((len(choices), len(stats)), dtype=np.int64)
    for row, choice in zip(found, choices, strict=True):
        row[list(choice.stored)] = [stats.memory[i] for i in choice.stored]
    return found
