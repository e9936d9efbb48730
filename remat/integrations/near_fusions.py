"""Choose which kernels of backward Inductor fuses. Importing this module imports Inductor."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from remat.graph.fused_liveness import NEAR_SUMS
from remat.torch_compat import ExternKernelSchedulerNode, InductorChoices

#: Nodes of the schedule by which an operator that is no kernel of Inductor's own may be moved ahead.
_NEAR = 20


class NearFusions(InductorChoices):
    """Kernels that read the same value are one, but not where whole layers would have to run earlier for it.

    Inductor puts such a kernel where the first of both stood. Where backward computes layers again, all that the
    other one reads, products included, would run that much earlier, and be alive until it is used: a GPT-2 that
    recomputes its attention took 9 % more memory.

    A kernel that sums is one with what reads the sum, but not where that waits for operators far behind it: a sum is
    small, and what is summed would stay until then. Gradients of weights that are used in every layer, or at every
    step of time, are such sums of sums: a net that uses two layers six times took 1.9 times as much memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scheduler: Any = None
        self._waits: dict[str, int] = {}
        self._operators: list[int] = []

    def uuid(self) -> str:
        """Identity of this choice in the keys of Inductor's caches."""
        return f"remat.near-fusions.{_NEAR}.{NEAR_SUMS}"

    def can_fuse_horizontal(  # type: ignore[override]  # a static method there, called on an instance
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        stands, waits = self._places(scheduler, node1, node2)
        return waits <= stands + _NEAR

    def can_fuse_vertical(  # type: ignore[override]  # likewise
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        if not InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        if not node1.is_reduction():
            return True
        before, until = (
            bisect_right(self._operators, place) for place in self._places(scheduler, node1, node2)
        )
        return until <= before + NEAR_SUMS

    def _places(self, scheduler: Any, node1: Any, node2: Any) -> tuple[int, int]:
        """Position of the first of two kernels, and of the last operator that the other kernel depends on."""
        if self._scheduler is not scheduler:
            self._scheduler, self._waits = scheduler, _waits(scheduler)
            self._operators = [
                n.min_order for n in _placed(scheduler) if isinstance(n, ExternKernelSchedulerNode)
            ]
        first, other = sorted((node1, node2), key=lambda n: n.min_order)
        waits = max((self._waits.get(n.get_name(), -1) for n in other.get_nodes()), default=-1)
        return int(first.max_order), waits


def _placed(scheduler: Any) -> list[Any]:
    """The live nodes of a schedule, in order."""
    placed = (n for n in scheduler.name_to_node.values() if hasattr(n, "min_order"))
    return sorted(placed, key=lambda n: n.min_order)


def _waits(scheduler: Any) -> dict[str, int]:
    """For each node of a schedule, the position of the last non-kernel operator that it depends on; -1 if none."""
    found: dict[str, int] = {}
    for node in _placed(scheduler):
        last = -1
        for read in node.unmet_dependencies:
            buffer = scheduler.name_to_buf.get(read.name)
            maker = (
                None if buffer is None else scheduler.name_to_node.get(buffer.defining_op_name())
            )
            if maker is None or maker.get_name() not in found:
                continue
            last = max(last, found[maker.get_name()])
            if isinstance(maker, ExternKernelSchedulerNode):
                last = max(last, maker.min_order)
        found[node.get_name()] = last
    return found
