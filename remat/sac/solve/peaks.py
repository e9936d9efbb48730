"""The memory of a step under a decision, moment by moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from remat.sac.estimate.calls import CallStats
from remat.sac.estimate.modules import ModuleTree
from remat.sac.estimate.stats import SACStats
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice


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


def simulate(tree: ModuleTree, decision: Mapping[int, ModuleChoice], plain: Ints) -> Simulated:
    """Follows a step in which some modules are checkpointed.

    From the end of its forward to the start of its backward, a module keeps what it stores and its
    inputs; then it runs again, and has back everything that backward reads.

    Args:
        tree: the modules.
        decision: module to what is chosen for it.
        plain: bytes alive by moment without checkpointing.
    """
    memory = plain.copy()
    for k, choice in decision.items():
        module = tree.modules[k]
        for call in module.calls:
            memory[call.end : call.back + 1] += choice.kept_bytes - call.freeable_bytes
            memory[call.begin : call.end] += _held_longer(call, module.operators, choice.stored)
    reruns = {}
    for k, choice in decision.items():
        module = tree.modules[k]
        for i, call in enumerate(module.calls):
            own = rerun_peak(call, module.operators, choice.stored) - choice.kept_bytes
            reruns[k, i] = int(memory[call.back]) + own
    peak = max([int(memory.max(initial=0)), *reruns.values()])
    return Simulated(memory=memory, reruns=reruns, peak_bytes=peak)


def moments_of_interest(tree: ModuleTree, modules: Mapping[int, object], plain: Ints) -> list[int]:
    """For each interval between ends of forward and starts of backward, the moment of most memory.

    No other moment can be a peak under any decision.
    """
    ends = {0, len(plain)}
    for k in modules:
        for call in tree.modules[k].calls:
            ends |= {call.end, call.back + 1}
    edges = sorted(e for e in ends if 0 <= e <= len(plain))
    return [a + int(np.argmax(plain[a:b])) for a, b in pairwise(edges)]


def rerun_peak(call: CallStats, stats: SACStats, stored: Sequence[int]) -> int:
    """Most bytes alive of a module's own while it runs again.

    Stored results wait for their operator; everything else is as in forward.
    """
    sizes = stats.memory
    waiting = np.zeros(len(call.made) + 1, dtype=np.int64)
    for i in stored:
        if sizes[i]:
            waiting[0] += sizes[i]
            waiting[call.freed_at[i][0] - call.begin] -= sizes[i]
    return int((call.made + np.cumsum(waiting)[:-1]).max(initial=0))


def _held_longer(call: CallStats, stats: SACStats, stored: Sequence[int]) -> Ints:
    """Bytes by moment of forward that are alive only because they are stored."""
    held = np.zeros(call.end - call.begin + 1, dtype=np.int64)
    for i in stored:
        size = stats.memory[i]
        if not size:
            continue
        start = call.freed_at[i][1]
        if start < call.end:
            held[max(start - call.begin, 0)] += size
    return np.cumsum(held)[:-1]
