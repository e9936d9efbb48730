"""Predict lifetimes of storages in fused code, from the graphs alone.

Of what `remat.graph.liveness` counts, such code never writes a pointwise result that only the same kernel
reads; it computes such a result where that kernel runs; and a kernel writes where an input lies that nobody
reads after it. Convolutions and attention take memory of their own beside their results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.costs.fused import is_passed_on, may_fuse, producer_of, readers_of
from remat.graph.index import inputs_of
from remat.graph.joint import outputs_of
from remat.graph.liveness import PeakMoment, StepWalk
from remat.graph.storages import Memories, hint, tensor_bytes

#: How many times the bytes of one argument an operator takes while it runs on a CPU: its name, the argument,
#: the times.
_WORKSPACES = (
    ("convolution_backward", 2, 2),
    ("convolution", 1, 1),
    ("_flash_attention_for_cpu_backward", 1, 1),
)

#: Where a convolution's backward is told which gradients to make, that of the input first.
_OUTPUT_MASK = 10
#: Operators that do not fuse between a sum of backward and what reads it, at most, if they are one kernel;
#: `remat.integrations.near_fusions` has Inductor keep to it.
NEAR_SUMS = 1
#: Reads beyond which a pointwise result is written once instead of computed by each kernel that reads it.
_MOST_READS = 4
#: Pointwise operators that are not computed twice in any case.
_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
#: Reads by index, of which PyTorch's partitioner does not know that Inductor fuses them.
_INDEXED = (torch.ops.aten._unsafe_index, torch.ops.aten._unsafe_masked_index)


def predict_peak(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memories: Memories | None = None,
) -> PeakMoment:
    """The peak of a step as a fusing compiler is expected to run it; arguments as of `simulate_peak`."""
    return FusedWalk(forward, backward, num_fwd_outputs, memories).peak()


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

    def workspaces(self) -> Iterator[tuple[fx.Node, int, int, int]]:
        """As `StepWalk.workspaces`, by rules: in a compiled step other operators take other memory.

        What they take for partial results, and copies of inputs in another layout: one for each that reads
        it, and a half makes them all before the first.
        """
        begun: dict[tuple[bool, fx.Node], int] = {}
        for moment, node in self.running():
            nbytes = _workspace(node)
            if nbytes:
                yield node, nbytes, moment, moment
            if "convolution" in str(node.target):
                sizes = _weight_for_its_sizes(node)
                for a in (a for a in node.all_input_nodes if a is not sizes and self._is_copied(a)):
                    first = begun.setdefault((moment < self.boundary, a), moment)
                    yield node, tensor_bytes(a.meta.get("val")), first, moment

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
        in_registers = {*made} - {key for key, _ in written}
        stays = {*self.inputs, *self.outputs, *kept, *in_registers}
        writing = {node for _, node in written}
        free = Counter(
            (node, nbytes[key])
            for key, moment in last.items()
            if key not in stays and (node := kernels.only_writer(readers[key], moment, writing))
        )
        found = {}
        for key, node in reversed(written):
            moment = kernels.first(node)
            if kernels.fuses(node) and free[node, nbytes[key]]:
                # It is written where something lies that is read for the last time, so it adds nothing now.
                free[node, nbytes[key]] -= 1
                moment = min(moment + 1, end)
            found[key] = (node, moment)
            last[key] = max(last.get(key, moment), moment)
        return found, last

    def _uses(
        self, nodes: list[fx.Node], made: dict[int, tuple[fx.Node, int]]
    ) -> tuple[dict[fx.Node, list[int]], dict[int, list[fx.Node]], set[int]]:
        """The storages that each node allocates, the readers of each, and those that the graph returns."""
        makes: dict[fx.Node, list[int]] = defaultdict(list)
        for key, (node, _) in made.items():
            makes[node].append(key)
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if not is_passed_on(node):
                read_by = (read for read in inputs_of(node) if not _fills(read, node))
                for key in (key for read in read_by for key in self.sizes.keys(read)):
                    readers[key].append(node)
        kept = {key for n in nodes if id(n) in self._kept for key in self.sizes.keys(n)}
        return makes, readers, kept


class _Kernels:
    """The kernels of one graph that compute each node, by the program points at which they run.

    A half is cut into segments at the operators that do not fuse; all that fuses in one is one kernel, which
    runs where the last of it stands.
    """

    def __init__(self, nodes: list[fx.Node], start: int, kept: set[int]) -> None:
        self._fuses = {n: may_fuse(n) or ops.packet(n.target) in _INDEXED for n in nodes}
        self._segments: dict[fx.Node, frozenset[int]] = {}
        self._moments: list[int] = [start]
        self._own: dict[fx.Node, int] = {}
        #: From which segment on something can be read, and whether a kernel of that one computes it.
        self._ready: dict[fx.Node, tuple[int, bool]] = {}
        #: The segments of kernels that read a value, by how many elements they compute.
        self._read_at: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        #: Reads of one element, through what is computed in registers; and whether that takes long.
        self._reads: dict[fx.Node, int] = {}
        self._heavy: dict[fx.Node, bool] = {}
        #: Products by the sums that Inductor computes them with, where those stand.
        self._products = {add: mm for add in nodes if (mm := _added_product(add)) is not None}
        self._fuses |= dict.fromkeys(self._products, False)
        self._inside = {*self._products.values()}
        segment = 0
        for moment, node in enumerate(nodes, start):
            self._segments[node] = frozenset((self._segment(node, segment),))
            if self._fuses[node]:
                if segment in self._segments[node]:
                    self._moments[segment] = moment
            elif not is_passed_on(node):
                self._own[node] = moment
                if node in self._products:
                    self._own[self._products[node]] = moment
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

    def _segment(self, node: fx.Node, now: int) -> int:
        """The segment of a node: that of a kernel that makes what it reads, if it can run there, else the one now."""
        given = [self._ready[n] for n in inputs_of(node) if n in self._ready]
        ready = max((at for at, _ in given), default=0)
        joins = (ready, True) in given
        if is_passed_on(node):
            self._ready[node] = ready, joins
        elif not self._fuses[node]:
            self._ready[node] = now + 1, False
        elif joins:
            return self._joined(node, ready)
        elif (beside := self._beside(node, ready, now)) is not None:
            return self._joined(node, beside)
        else:
            self._ready[node] = ready, ready == now
            self._note_reads(node, now)
        return now

    def _joined(self, node: fx.Node, at: int) -> int:
        """Puts a node into the kernel of an earlier segment, with what it reads; returns that segment."""
        self._pull(inputs_of(node), at)
        self._ready[node] = at, True
        self._note_reads(node, at)
        return at

    def _beside(self, node: fx.Node, ready: int, now: int) -> int | None:
        """The first segment, from where a node can run to before now, with a kernel that reads what it reads.

        Only a kernel of as many elements is one with it.
        """
        size = _numel(node)
        found = (
            at
            for read in inputs_of(node)
            for at in self._read_at.get((producer_of(read), size), ())
        )
        return min((at for at in found if ready <= at < now), default=None)

    def _note_reads(self, node: fx.Node, at: int) -> None:
        for read in inputs_of(node):
            self._read_at[producer_of(read), _numel(node)].append(at)

    def _pull(self, read: Iterable[fx.Node], to: int) -> None:
        """Moves what could run earlier, too, to the segment of the kernel that it is read in."""
        waiting = [*read]
        while waiting:
            node = waiting.pop()
            if node in self._segments and min(self._segments[node]) > to:
                self._segments[node] = frozenset((to,))
                waiting += inputs_of(node)

    def fuses(self, node: fx.Node) -> bool:
        return self._fuses[node]

    def only_writer(
        self, readers: Iterable[fx.Node], moment: int, writing: Container[fx.Node]
    ) -> fx.Node | None:
        """The one node by which what is read in a kernel comes to be written; None where there are more."""
        found: set[fx.Node] = set()
        waiting = [n for n in readers if self.last(n) == moment]
        seen = {*waiting}
        while waiting and len(found) < 2:
            node = waiting.pop()
            if node in writing or not self._fuses[node]:
                found.add(node)
            else:
                new = {n for n in readers_of(node) if n in self._fuses} - seen
                waiting += new
                seen |= new
        return found.pop() if len(found) == 1 else None

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
        alone = len(node.users) < 2
        return alone or (self._reads[node] <= _MOST_READS and not self._heavy[node])

    def _is_summed_at_once(self, node: fx.Node, at: frozenset[int]) -> bool:
        """Whether a sum of backward keeps its position because its reader is far away; see `remat.integrations.near_fusions`."""
        if not at or not node.meta.get("autograd_backward") or _is_pointwise(node):
            return False
        smaller = _numel(node) < max(map(_numel, inputs_of(node)), default=0)
        return smaller and min(at) > max(self._segments[node]) + NEAR_SUMS

    def place(
        self, node: fx.Node, keys: list[int], readers: dict[int, list[fx.Node]], kept: set[int]
    ) -> list[int]:
        """Moves a node to the kernels that read it; returns the storages that it writes."""
        if not self._fuses[node]:
            return [] if node in self._inside else keys
        flows = [k for k in keys if k not in kept and all(self._fuses[r] for r in readers[k])]
        at = frozenset(s for k in flows for r in readers[k] for s in self._segments[r])
        if self._is_summed_at_once(node, at):
            at = frozenset()
        if at and len(flows) == len(keys) and (len(at) == 1 or self._inlines(node)):
            self._segments[node] = at
        mine = self._segments[node]
        return [
            k
            for k in keys
            if k not in flows or any(not self._segments[r] <= mine for r in readers[k])
        ]


def _weight_for_its_sizes(node: fx.Node) -> Any:
    """The weight of a convolution's backward that makes no gradient of the input: only its sizes matter."""
    of_backward = "convolution_backward" in str(node.target) and len(node.args) > _OUTPUT_MASK
    return node.args[2] if of_backward and not node.args[_OUTPUT_MASK][0] else None  # type: ignore[index]


def _fills(read: fx.Node, node: fx.Node) -> bool:
    """Whether a node writes into a copy of what it reads, which is one number everywhere: it fills that itself."""
    name = str(node.target).split(".")[1:2]
    puts = any(part in n and n[-1] != "_" for n in name for part in ("index_put", "scatter"))
    return puts and read is node.args[0] and read.target is torch.ops.aten.full.default


def _workspace(node: fx.Node) -> int:
    """Bytes that an operator takes for partial results while it runs on a CPU."""
    name = str(node.target)
    for part, argument, times in _WORKSPACES:
        if part in name:
            read = [a for a in node.args if isinstance(a, fx.Node)]
            value = read[argument].meta.get("val") if argument < len(read) else None
            on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
            return times * tensor_bytes(value) if on_cpu else 0
    return 0


def _added_product(node: fx.Node) -> fx.Node | None:
    """The product of two matrices that only a sum reads, and that Inductor makes one ``addmm`` of with it."""
    aten = torch.ops.aten
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    for product, other in (node.args[1::-1], node.args[:2]):
        assert isinstance(product, fx.Node)
        assert isinstance(other, fx.Node)
        made, added = product.meta.get("val"), other.meta.get("val")
        if product.target is not aten.mm.default or len(product.users) != 1:
            continue
        if not isinstance(made, torch.Tensor) or not isinstance(added, torch.Tensor):
            continue
        alike = made.dtype == added.dtype and _expands(added.shape, made.shape)
        if alike and (made.device.type == "cpu" or not all(map(may_fuse, node.users))):
            return product
    return None


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape can be expanded to another one, of which it has no more dimensions."""
    ends = zip(reversed([hint(n) for n in shape]), reversed([hint(n) for n in to]), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in ends)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether every element of the result is made of few elements of what is read: no reduction, no draw."""
    sizes = [_numel(n) for n in inputs_of(node)]
    return max(sizes, default=0) <= _numel(node) and not ops.draws_in_order(node)


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0
