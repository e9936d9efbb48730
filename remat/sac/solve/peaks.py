"""Simulate the memory of a training step in which some of the model's modules are checkpointed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat.sac.estimation.lifetimes import CallStats, Ints
from remat.sac.estimation.modules import ModuleStats, ModuleTree
from remat.sac.solve.choices import StoredSet

#: A checkpointing decision, as a dict from the position of each checkpointed module to the results that it stores.
Decision = Mapping[int, StoredSet]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """Simulated memory of a step in which modules are checkpointed.

    Attributes:
        memory: bytes alive at each program point, without the bytes that recomputation allocates.
        reruns: dict from (position of a module, position of one of the module's calls) to the peak bytes
            of the step while this call is recomputed.
        peak_bytes: peak of the step, the maximum of ``memory`` and ``reruns``.
    """

    memory: Ints
    reruns: dict[tuple[int, int], int]
    peak_bytes: int


def simulate(tree: ModuleTree, decision: Decision, plain: Ints) -> Simulated:
    """Simulate the memory of a step under a decision; ``plain`` has the bytes alive without checkpointing."""
    memory, program_points = plain.copy(), np.arange(len(plain))
    reruns: dict[tuple[int, int], int] = {}
    for k, stored_set in decision.items():
        added = AddedBytes(tree.modules[k], [stored_set], tree.state_bytes)
        memory += added.at(program_points)[0]
        reruns |= {(k, i): int(added.in_rerun(i)[0]) for i in range(len(added.calls))}
    # `memory` is added last, because `memory` at the rerun of a call depends on the decisions for all modules.
    for k, i in reruns:
        reruns[k, i] += int(memory[tree.modules[k].calls[i].back])
    peak = max([int(memory.max(initial=0)), *reruns.values()])
    return Simulated(memory=memory, reruns=reruns, peak_bytes=peak)


class AddedBytes:
    """Bytes that checkpointing one module adds to a step's memory, for each set of results that it may store.

    A checkpointed module keeps its stored results and its inputs from the end of its forward to the start of its
    backward. At the start of its backward, a checkpointed module runs again and makes the tensors that backward reads
    and that were not stored.

    Args:
        module: the module.
        sets: the sets of results that the module may store.
        state_bytes: bytes of the random generator's state, which PyTorch keeps from the start of the
            module's forward to the end of its backward.

    Attributes:
        calls: memory of each call of the module without checkpointing.
    """

    def __init__(self, module: ModuleStats, sets: Sequence[StoredSet], state_bytes: int) -> None:
        self.calls = module.calls
        self._state_bytes = state_bytes
        memory = module.operators.memory
        # A row per stored set, and a column per operator: the stored bytes, 0 if the set lacks the operator.
        self._stored = np.zeros((len(sets), len(memory)), dtype=np.int64)
        for row, stored_set in zip(self._stored, sets, strict=True):
            row[list(stored_set.stored)] = [memory[i] for i in stored_set.stored]
        self._kept_bytes = np.array([[s.kept_bytes] for s in sets], dtype=np.int64)

    def at(self, program_points: Ints) -> Ints:
        """Return the bytes that checkpointing adds: a row per set of stored results, a column per program point."""
        added = np.zeros((len(self._stored), len(program_points)), dtype=np.int64)
        for call in self.calls:
            begin, end, back, over = np.searchsorted(
                program_points, (call.begin, call.end, call.back + 1, call.back_end + 1)
            )
            added[:, begin:over] += self._state_bytes
            added[:, end:back] += self._kept_bytes - call.freeable_bytes
            if begin < end:
                added[:, begin:end] += self._held_longer(call, program_points[begin:end])
        return added

    def in_rerun(self, i: int) -> Ints:
        """Return, per set of stored results, the most bytes that recomputing call ``i`` adds at `CallStats.back`."""
        call = self.calls[i]
        ran = np.zeros((len(self._stored), call.end - call.begin), dtype=np.int64)
        ran[:, [program_point - call.begin for program_point, _ in call.freed_at]] = self._stored
        # A stored result is alive from the start of recomputation on. All other storages are alive as in forward.
        waiting = self._stored.sum(axis=1, keepdims=True) - np.cumsum(ran, axis=1)
        peaks: Ints = (call.allocated + waiting).max(axis=1, initial=0)
        # The memory at `back` contains the stored results already. For a rerun, PyTorch keeps the
        # generator's current state beside its state in forward.
        return peaks - self._kept_bytes[:, 0] + self._state_bytes

    def _held_longer(self, call: CallStats, program_points: Ints) -> Ints:
        """Return the bytes of results that, at points of a call's forward, are alive only because they are stored."""
        freed = np.array([died for _, died in call.freed_at], dtype=np.int64)
        order = np.argsort(freed, kind="stable")
        held = np.cumsum(np.pad(self._stored[:, order], ((0, 0), (1, 0))), axis=1)
        columns: Ints = held[:, np.searchsorted(freed[order], program_points, side="right")]
        return columns
