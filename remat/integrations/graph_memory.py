"""The memory that one compiled graph takes alone; `StepTally` adds up this memory over the graphs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import LastWarning, RematError
from remat.graph.joint import primal_place
from remat.graph.memory.liveness import StorageKind, Timeline
from remat.graph.memory.storages import hint
from remat.integrations.step_sizes import RunSizes, SizedBytes
from remat.integrations.step_together import Member
from remat.planning.plan import Plan


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class GraphMemory:
    """Memory of one compiled graph alone, without its inputs.

    Attributes:
        name: name of the graph, for messages.
        forward_bytes: most bytes alive at one time in forward.
        backward_bytes: most bytes alive at one time in backward, without forward's outputs.
        retained_bytes: ``backward_bytes`` if the autograd graph is retained, so that backward frees no saved value.
        held_bytes: bytes of the values saved for backward that are neither inputs nor outputs.
        read: positions of the inputs that backward reads.
        reread_outputs: positions of the outputs that backward reads.
        own: parameters and buffers that are attributes of the graph's module instead of inputs.
        parameters: positions of the inputs that are parameters.
        values: positions of the inputs that are tensors but not parameters.
        sizes: reader of the symbolic sizes in a run of the graph; None if ``bytes_at`` is None.
        bytes_at: function from ranges of sizes to an upper bound of the graph's own peak in bytes.
            None if that peak does not depend on sizes.
        fixed_bytes: bytes of all parameters and buffers. This part of the peak does not depend on
            sizes.
        member: what is needed to plan the graph together with other graphs; None if that is not possible.
        last_warning: the peak that the last warning about a step with this graph named.
    """

    name: str
    forward_bytes: int
    backward_bytes: int
    retained_bytes: int
    held_bytes: int
    read: frozenset[int]
    reread_outputs: tuple[int, ...]
    own: tuple[torch.Tensor, ...] = ()
    parameters: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    sizes: RunSizes | None = None
    bytes_at: SizedBytes | None = None
    fixed_bytes: int = 0
    member: Member | None = None
    last_warning: LastWarning = field(default_factory=LastWarning)
    _factors: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, gm: fx.GraphModule, inputs: Sequence[Any]) -> GraphMemory:
        """Build the `GraphMemory` of a graph that was compiled with a plan."""
        own = (
            *(p for _, p in gm.named_parameters(remove_duplicate=False)),
            *(b for _, b in gm.named_buffers(remove_duplicate=False)),
        )
        places = (primal_place(name) for name in plan.saved)
        forward, backward, retained = _highest(plan)
        tensors = [k for k, v in enumerate(inputs) if isinstance(v, torch.Tensor)]
        parameters = [k for k in tensors if isinstance(inputs[k], torch.nn.Parameter)]
        bytes_at = SizedBytes(plan) if plan.symbolic or plan.learns_sizes else None
        return cls(
            name=plan.graph,
            forward_bytes=forward,
            backward_bytes=backward,
            retained_bytes=retained,
            held_bytes=plan.saved_bytes,
            read=frozenset(k - len(own) for k in places if k is not None and k >= len(own)),
            reread_outputs=plan.reread_outputs,
            own=own,
            parameters=tuple(parameters),
            values=tuple(k for k in tensors if k not in parameters),
            sizes=None if bytes_at is None else RunSizes(plan, inputs, bytes_at.symbols),
            bytes_at=bytes_at,
            fixed_bytes=sum(
                dict(map(storage_of, (*own, *(inputs[k] for k in parameters)))).values()
            ),
        )

    def scaled(self, arguments: Sequence[Any], node: Any) -> float:
        """Return by which factor a run takes more bytes than planned because its sizes are larger; at least 1.

        The factor compares two peaks of the graph, at the run's sizes and at the planned sizes, both without parameters
        and buffers.
        """
        if self.bytes_at is None or self.sizes is None:
            return 1.0
        seen = self.sizes.read(arguments, node)
        if all(number <= self.sizes.planned[name].number for name, number in seen.items()):
            return 1.0
        key = tuple(seen.values())
        if key not in self._factors:
            taken = self.bytes_at.taken - self.fixed_bytes
            more = self.bytes_at({n: (k, k) for n, k in seen.items()}) - self.bytes_at.taken
            self._factors.clear()  # sizes from data may differ in each step
            self._factors[key] = 1 + max(0, more) / max(1, taken)
        return self._factors[key]


def _highest(plan: Plan) -> tuple[int, int, int]:
    """Return the most bytes alive at once in forward, in backward, and in backward with a retained autograd graph."""
    try:
        # Inputs are counted by `StepTally`, and so are forward's outputs in backward.
        timeline: Timeline = plan.timeline
    except RematError:  # a plan from a cache without a timeline
        return plan.peak_bytes, plan.peak_bytes, plan.peak_bytes
    kinds = [k for k in StorageKind if k is not StorageKind.INPUT]
    forward = max(timeline.nbytes(*kinds)[: timeline.boundary], default=0)
    kinds.remove(StorageKind.OUTPUT)
    backward = max(timeline.nbytes(*kinds)[timeline.boundary :], default=0)
    kinds.remove(StorageKind.SAVED)
    retained = max(timeline.nbytes(*kinds)[timeline.boundary :], default=0) + plan.saved_bytes
    return forward, backward, retained


def storage_of(value: torch.Tensor) -> tuple[int, int]:
    """Return id and bytes of a tensor's storage; (0, 0) if the tensor has no storage of its own."""
    try:
        storage = value.untyped_storage()
        return torch_compat.storage_id(storage), hint(storage.nbytes())
    except (NotImplementedError, RuntimeError):
        return 0, 0
