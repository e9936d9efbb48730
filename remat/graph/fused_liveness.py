"""What is alive when in code that a fusing compiler makes of a step: a prediction, from the graphs alone.

Of what `remat.graph.liveness` counts, such code never writes a pointwise result that only the same kernel
reads; it computes such a result where that kernel runs; and a kernel writes where an input lies that nobody
reads after it. Convolutions and attention take memory of their own beside their results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import fx

from remat.graph import ops
from remat.graph.costs.fused import is_passed_on, may_fuse
from remat.graph.index import inputs_of
from remat.graph.joint import outputs_of
from remat.graph.liveness import PeakMoment, StepWalk, peak_of, sums_of
from remat.graph.storages import Memories, hint, tensor_bytes

#: How many times the bytes of one argument an operator takes while it runs on a CPU: its name, the argument,
#: the times.
_WORKSPACES = (
    ("convolution_backward", 2, 2),
    ("convolution", 1, 1),
    ("_flash_attention_for_cpu_backward", 1, 1),
)

#: Reads beyond which a pointwise result is written once instead of computed by each kernel that reads it.
_MOST_READS = 4
#: Pointwise operators that are not computed twice in any case.
_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


def predict_peak(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memories: Memories | None = None,
) -> PeakMoment:
    """The peak of a step as a fusing compiler is expected to run it; arguments as of `simulate_peak`."""
    walk = FusedWalk(forward, backward, num_fwd_outputs, memories)
    spans = [x[2:] for x in walk.lifetimes()]
    sums = sums_of([*spans, *walk.workspaces()], len(walk.moments))
    return peak_of(sums, walk.moments, walk.boundary)


class FusedWalk(StepWalk):
    """As `StepWalk`, but pointwise operators and reductions between two others are one kernel.

    It runs where the last of them stands.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_fwd_outputs: int,
        memories: Memories | None,
    ) -> None:
        super().__init__(forward, backward, num_fwd_outputs, memories)
        self._kept = {id(v) for m in (forward, backward) for v in outputs_of(m.graph)}

    def workspaces(self) -> Iterator[tuple[int, int, int]]:
        """Bytes that operators take beside what they read and return, with the moment, twice."""
        for moment, node in self.running():
            nbytes = self._workspace(node)
            if nbytes:
                yield nbytes, moment, moment

    def _workspace(self, node: fx.Node) -> int:
        """Bytes that an operator takes while it runs: for partial results, and for inputs in another layout."""
        name = str(node.target)
        for part, argument, times in _WORKSPACES:
            if part in name:
                read = [a for a in node.args if isinstance(a, fx.Node)]
                if argument >= len(read):
                    return 0
                laid_out = read if "convolution" in part else []
                copies = sum(
                    tensor_bytes(a.meta.get("val")) for a in laid_out if self._is_copied(a)
                )
                value = read[argument].meta.get("val")
                on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
                return copies + (times * tensor_bytes(value) if on_cpu else 0)
        return 0

    def _is_copied(self, node: fx.Node) -> bool:
        """Whether a convolution reads a copy of an input of the step, with its channels last."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            return False
        given = any(key in self.inputs for key in self.sizes.keys(node))
        return given and not value.is_contiguous(memory_format=torch.channels_last)

    def _walk(
        self, nodes: list[fx.Node], start: int, there: set[int]
    ) -> tuple[dict[int, tuple[fx.Node, int]], dict[int, int]]:
        made, _ = super()._walk(nodes, start, there)
        kernels = _Kernels(nodes, start, self._kept)
        makes, readers, kept = self._uses(nodes, made)
        written = [  # readers first, as a node runs where it is read
            (key, node)
            for node in reversed(nodes)
            for key in kernels.place(node, makes[node], readers, kept)
        ]
        last = {key: max(map(kernels.last, found)) for key, found in readers.items() if found}
        nbytes, end = self.sizes.nbytes, start + max(0, len(nodes) - 1)
        stays = {*self.inputs, *self.outputs, *kept}
        free = Counter((moment, nbytes[key]) for key, moment in last.items() if key not in stays)
        found = {}
        for key, node in reversed(written):
            moment = kernels.first(node)
            if kernels.fuses(node) and free[moment, nbytes[key]]:
                # It is written where something lies that is read for the last time, so it adds nothing now.
                free[moment, nbytes[key]] -= 1
                moment = min(moment + 1, end)
            found[key] = (node, moment)
            last[key] = max(last.get(key, moment), moment)
        return found, last

    def _uses(
        self, nodes: list[fx.Node], made: dict[int, tuple[fx.Node, int]]
    ) -> tuple[dict[fx.Node, list[int]], dict[int, list[fx.Node]], set[int]]:
        """The storages that each node makes, who reads each of them, and which the half returns."""
        makes: dict[fx.Node, list[int]] = defaultdict(list)
        for key, (node, _) in made.items():
            makes[node].append(key)
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if not is_passed_on(node):
                for key in (key for read in inputs_of(node) for key in self.sizes.keys(read)):
                    readers[key].append(node)
        kept = {key for n in nodes if id(n) in self._kept for key in self.sizes.keys(n)}
        return makes, readers, kept


class _Kernels:
    """Which kernels of one half compute each node, by the moments at which those run.

    A half is cut into segments at the operators that do not fuse; all that fuses in one is one kernel, which
    runs where the last of it stands.
    """

    def __init__(self, nodes: list[fx.Node], start: int, kept: set[int]) -> None:
        self._fuses = {n: may_fuse(n) for n in nodes}
        self._segments: dict[fx.Node, frozenset[int]] = {}
        self._moments: list[int] = [start]
        self._own: dict[fx.Node, int] = {}
        #: Reads of one element, through what is computed in registers; and whether that takes long.
        self._reads: dict[fx.Node, int] = {}
        self._heavy: dict[fx.Node, bool] = {}
        segment = 0
        for moment, node in enumerate(nodes, start):
            self._segments[node] = frozenset((segment,))
            if self._fuses[node]:
                self._moments[segment] = moment
            elif not is_passed_on(node):
                self._own[node] = moment
                segment += 1
                self._moments.append(moment + 1)
            inlined = [n for n in inputs_of(node) if self._inlines(n) and id(n) not in kept]
            self._reads[node] = sum(self._reads[n] for n in inlined) + sum(
                n not in inlined for n in inputs_of(node)
            )
            name = str(node.target)
            self._heavy[node] = any(self._heavy[n] for n in inlined) or any(
                f".{op}." in name for op in _HEAVY
            )

    def fuses(self, node: fx.Node) -> bool:
        return self._fuses[node]

    def first(self, node: fx.Node) -> int:
        """When the first kernel of a node runs."""
        return self._own[node] if node in self._own else self._moments[min(self._segments[node])]

    def last(self, node: fx.Node) -> int:
        """When the last kernel of a node runs."""
        return self._own[node] if node in self._own else self._moments[max(self._segments[node])]

    def _inlines(self, node: fx.Node) -> bool:
        """Whether a node is computed again by each kernel that reads it, rather than written once."""
        if not self._fuses.get(node) or not _is_pointwise(node):
            return is_passed_on(node) and node in self._reads
        return self._reads[node] <= _MOST_READS and not self._heavy[node]

    def place(
        self, node: fx.Node, keys: list[int], readers: dict[int, list[fx.Node]], kept: set[int]
    ) -> list[int]:
        """Moves a node to the kernels that read it; returns the storages that it writes."""
        if not self._fuses[node]:
            return keys
        flows = [k for k in keys if k not in kept and all(self._fuses[r] for r in readers[k])]
        at = frozenset(s for k in flows for r in readers[k] for s in self._segments[r])
        if at and len(flows) == len(keys) and (len(at) == 1 or self._inlines(node)):
            self._segments[node] = at
        mine = self._segments[node]
        return [
            k
            for k in keys
            if k not in flows or any(not self._segments[r] <= mine for r in readers[k])
        ]


def _is_pointwise(node: fx.Node) -> bool:
    """Whether every element of the result is made of few elements of what is read: no reduction, no draw."""
    sizes = [_numel(n) for n in inputs_of(node)]
    return max(sizes, default=0) <= _numel(node) and not ops.draws_in_order(node)


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0
