"""The memory of a step under a decision, moment by moment; what a plan promises is read off here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from remat.sac.estimate.calls import Bytes
from remat.sac.estimate.modules import ModuleTree
from remat.sac.solve.choices import Choice, held_longer, rerun_peak


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """The memory of a step in which modules are checkpointed.

    Attributes:
        memory: bytes alive by moment, while nothing runs again.
        reruns: bytes at the peak while a module runs again, by module and call.
        peak_bytes: most of all of them.
    """

    memory: Bytes
    reruns: dict[tuple[int, int], int]
    peak_bytes: int


def simulate(
    tree: ModuleTree, decision: Mapping[int, Choice], plain: Bytes, *, held: bool = True
) -> Simulated:
    """Follows a step in which some modules are checkpointed.

    From the end of its forward to the start of its backward, a module keeps what it stores and its
    inputs; then it runs again, and has back everything that backward reads.

    Args:
        tree: the modules.
        decision: module to what is chosen for it.
        plain: bytes alive by moment without checkpointing.
        held: whether to count, within a module's forward, what lives only because it is stored.
    """
    memory = plain.copy()
    for k, choice in decision.items():
        stats = tree.modules[k].stats
        assert stats is not None
        for call in tree.modules[k].calls:
            change = choice.kept_bytes + call.input_bytes - call.activation_bytes
            memory[call.end : call.back + 1] += change
            if held:
                memory[call.begin : call.end] += held_longer(call, stats, choice.stored)
    reruns = {}
    for k, choice in decision.items():
        stats = tree.modules[k].stats
        assert stats is not None
        for i, call in enumerate(tree.modules[k].calls):
            own = rerun_peak(call, stats, choice.stored) - choice.kept_bytes
            reruns[k, i] = int(memory[call.back]) + own
    peak = max([int(memory.max(initial=0)), *reruns.values()])
    return Simulated(memory=memory, reruns=reruns, peak_bytes=peak)


def moments_of_interest(tree: ModuleTree, modules: Mapping[int, object], plain: Bytes) -> list[int]:
    """Of all moments at which the same modules are done and not yet back, the one with most memory.

    No other moment can be a peak, whatever is decided.
    """
    ends = {0, len(plain)}
    for k in modules:
        for call in tree.modules[k].calls:
            ends |= {call.end, call.back + 1}
    edges = sorted(e for e in ends if 0 <= e <= len(plain))
    return [a + int(np.argmax(plain[a:b])) for a, b in pairwise(edges)]
