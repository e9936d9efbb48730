"""Bytes alive over the step of a plan, told apart by what is the same for every plan."""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph.fused_liveness import FusedWalk
from remat.graph.liveness import StepWalk, StorageKind, sums_of
from remat.planning.candidates import Candidate
from remat.planning.prepared import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of forward and backward under one plan, at each moment.

    Attributes:
        total: bytes alive, parameters and inputs included.
        gradients: bytes of gradients among them, with those of the root.
        root_gradients: bytes of those gradients whose size no block's has.
        boundary: number of forward's moments.
        input_bytes: bytes of the parameters, buffers and inputs that the graph reads.
        output_bytes: bytes of what forward returns.
    """

    total: tuple[int, ...]
    gradients: tuple[int, ...]
    root_gradients: tuple[int, ...]
    boundary: int
    input_bytes: int
    output_bytes: int

    @classmethod
    def of(
        cls,
        decider: Prepared,
        decided: Candidate,
        *,
        block_sizes: frozenset[int] = frozenset(),
    ) -> StepMemory:
        """The memory of a decision, as the lowering of its graph is expected to run it.

        Args:
            decider: has the graph.
            decided: the decision.
            block_sizes: bytes of each parameter of a block.
        """
        done = decider.split(decided)
        assert done.forward is not None
        assert done.backward is not None
        fused = done.joint.lower == "inductor"
        walk = (FusedWalk if fused else StepWalk)(
            done.forward, done.backward, done.joint.num_fwd_outputs, done.joint.memories
        )
        found = list(walk.lifetimes())
        spans = [x[2:] for x in found]
        gradients = [x[2:] for x in found if walk.kind(x[0], x[3], x[1]) is StorageKind.GRADIENT]
        moments = len(walk.moments)
        return cls(
            total=sums_of(spans, moments),
            gradients=sums_of(gradients, moments),
            root_gradients=sums_of((g for g in gradients if g[0] not in block_sizes), moments),
            boundary=walk.boundary,
            input_bytes=sum(walk.sizes.nbytes[k] for k in walk.inputs),
            output_bytes=sum(b for k, b in walk.outputs.items() if k not in walk.inputs),
        )

    @property
    def peak(self) -> int:
        """Most bytes alive, in bytes."""
        return max(self.total)

    def sharded_peak(self, shards: int, *, forward_bytes: int, backward_bytes: int) -> int:
        """Most bytes alive where inputs are something else, and blocks' gradients are sharded once they are there.

        Args:
            shards: into how many parts.
            forward_bytes: what stands for the inputs in forward.
            backward_bytes: what stands for them in backward.
        """
        peak = 0
        curves = zip(self.total, self.gradients, self.root_gradients, strict=True)
        for moment, (total, gradients, root) in enumerate(curves):
            rest = total - gradients - self.input_bytes + root - (root - gradients) // shards
            peak = max(peak, rest + (forward_bytes if moment < self.boundary else backward_bytes))
        return peak
