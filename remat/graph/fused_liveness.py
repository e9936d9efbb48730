"""Predict the lifetimes of storages in fused code, from the graphs alone.

Fused code differs from the model of `remat.graph.liveness` in three ways. A pointwise result that
only one kernel reads is never written, because this kernel computes the result itself. A kernel may
write its result over an input that no later node reads. Convolutions and attention allocate
workspaces besides their results.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.costs.fused import is_passed_on, may_fuse, producer_of, readers_of
from remat.graph.index import inputs_of
from remat.graph.joint import outputs_of
from remat.graph.liveness import StepWalk
from remat.graph.storages import Memories, hint, tensor_bytes
from remat.graph.writes import by_target

#: Workspaces that operators allocate on a CPU besides their results. Each entry is (part of the operator's name, index
#: of one tensor argument, workspace bytes divided by the bytes of this argument). Only tensor arguments are counted.
_WORKSPACES = (
    # Names are matched as substrings, so the longer name stands first.
    ("convolution_backward", 2, 2),
    ("convolution", 1, 1),
    ("_flash_attention_for_cpu_backward", 1, 1),
)

#: Index of the argument ``output_mask`` of ``convolution_backward``. The first entry of this mask says whether the
#: gradient of the convolution's input is computed.
_OUTPUT_MASK = 10
#: Number of dimensions of what a three-dimensional convolution reads.
_OF_VOLUMES = 5
#: A sum in backward and its reader form one kernel only if at most this number of unfusible operators run between
#: the sum and the reader. `remat.integrations.near_fusions` makes Inductor keep this limit.
NEAR_SUMS = 1
#: A pointwise result that several nodes read is computed again in each reader's kernel if one element needs at most
#: this number of memory reads. Otherwise the result is written to memory once.
_MOST_READS = 4
#: Expensive pointwise operators. If several nodes read the result, it is written to memory once, and no reader's
#: kernel computes it again.
_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
#: Indexed reads. Inductor fuses them, but the operator lists of PyTorch's partitioner leave them out.
_INDEXED = (torch.ops.aten._unsafe_index, torch.ops.aten._unsafe_masked_index)
#: Fused operators whose results are contiguous, whatever the format of their inputs.
_CONTIGUOUS = (*_INDEXED, torch.ops.aten.cat)


def predict_peak(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memories: Memories | None = None,
) -> int:
    """Predict the peak memory of a step under a fusing compiler, in bytes.

    Args:
        forward: module that returns the user's outputs, then the values saved for backward.
        backward: module that takes the saved values and the tangents, and returns gradients.
        num_fwd_outputs: number of forward's outputs before the saved values.
        memories: cache of the storages behind the fake values; None starts an empty cache.
    """
    return max(FusedWalk(forward, backward, num_fwd_outputs, memories).alive())


class FusedWalk(StepWalk):
    """Simulation of a step's memory that models fusion, unlike its base class.

    Some operators, such as matrix products, never fuse. All pointwise operators and reductions
    between two such operators form one kernel, which runs at the position of its last operator.
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
        """Yield the predicted workspaces, as (node, bytes, first moment, last moment).

        A workspace is memory that an operator allocates besides its result. Measured workspaces of
        single operators do not apply to a compiled step, so fixed rules predict three kinds. The
        first kind is memory for partial results. The second kind is channels-last copies of the
        step's inputs, one for each convolution that reads an input. Forward makes all copies of an
        input before the first of these convolutions runs. Backward does the same. The third kind
        is a computed value whose channels-last copy a convolution reads. The kernel that computes
        the value makes the copy. After this kernel, only the copy is alive if the value is a view of
        a result of another shape, as in the backward of a group norm. Otherwise other nodes read the
        value, too, as with the gradient of a residual sum, and both are alive.

        A backward that recomputes no convolution makes no such copies for a ``convolution_backward``
        whose input is contiguous. The operator then copies all that it reads.
        """
        begun: dict[tuple[bool, fx.Node], int] = {}
        aten, called = torch.ops.aten, {n.target for n in self._backward}
        leaves = aten.convolution_backward.default in called
        leaves = leaves and aten.convolution.default not in called
        contiguous = self._contiguous() if leaves else set()
        computed: dict[fx.Node, int] = {}
        for moment, node in self.running():
            computed[node] = moment
            if _workspace_of(node.target) is None:
                continue
            if node in contiguous:
                read = node.all_input_nodes[:3]  # the result's gradient, the input and the weight
                yield node, sum(tensor_bytes(a.meta["val"]) for a in read), moment, moment
                continue
            nbytes = _workspace(node)
            if nbytes:
                yield node, nbytes, moment, moment
            if "convolution" in str(node.target):
                sizes = _weight_for_its_sizes(node)
                for a in (a for a in node.all_input_nodes if a is not sizes and self._is_copied(a)):
                    first = begun.setdefault((moment < self.boundary, a), moment)
                    yield node, tensor_bytes(a.meta.get("val")), first, moment
                for a in filter(_is_reshaped, node.all_input_nodes):
                    at = self._end_of_kernel(computed[producer_of(a)])
                    yield node, tensor_bytes(a.meta.get("val")), at, at
                if "convolution_backward" in str(node.target):
                    for a in filter(_keeps_its_layout, node.all_input_nodes[:2]):
                        yield node, tensor_bytes(a.meta.get("val")), computed[a], moment

    def _end_of_kernel(self, moment: int) -> int:
        """Return the moment before the first later node that never fuses.

        Args:
            moment: moment of a fusible node, which another node follows.
        """
        ran = [*self._forward, *self._backward]
        later = enumerate(ran[moment + 1 :], moment)
        return next(m for m, n in later if not (may_fuse(n) or is_passed_on(n)))

    def _is_copied(self, node: fx.Node) -> bool:
        """Return whether convolutions read a channels-last copy of a node's value.

        True if the value is a four-dimensional input of the step that is not in channels-last
        format.
        """
        if not _is_image(node) or not any(key in self.inputs for key in self.sizes.keys(node)):
            return False
        return not node.meta["val"].is_contiguous(memory_format=torch.channels_last)

    def _contiguous(self) -> set[fx.Node]:
        """Return each ``convolution_backward`` on a CPU whose input is contiguous.

        Forward saves the values that it computes in channels-last format. A fused result has the
        format of its inputs, unless it concatenates or indexes them.
        """
        channels_last: set[fx.Node] = set()

        def is_channels_last(node: fx.Node) -> bool:
            node = producer_of(node)
            given = node.op == "placeholder" and _is_image(node) and not self._is_copied(node)
            return given or node in channels_last

        found = set()
        for node in self._backward:
            if node.target is torch.ops.aten.convolution_backward.default:
                given = node.all_input_nodes[:2][-1]
                on_cpu = _is_image(given) and given.meta["val"].device.type == "cpu"
                if on_cpu and not is_channels_last(given):
                    found.add(node)
            if ops.packet(node.target) in _CONTIGUOUS:
                continue
            if not may_fuse(node):
                channels_last.add(node)
            elif _is_image(node):
                size = _numel(node)
                if any(_numel(n) >= size and is_channels_last(n) for n in inputs_of(node)):
                    channels_last.add(node)
        return found

    def _walk(
        self, nodes: list[fx.Node], start: int, there: set[int]
    ) -> tuple[dict[int, tuple[fx.Node, int]], dict[int, int]]:
        made, _ = super()._walk(nodes, start, there)
        kernels = _Kernels(nodes, start, self._kept)
        makes, readers, kept = self._uses(nodes, made, kernels.passed_on)
        written = [  # readers first, because a node moves to the kernels of its readers
            (key, node)
            for node in reversed(nodes)
            for key in kernels.place(node, makes[node], readers, kept)
        ]
        last = {key: max(map(kernels.last, found)) for key, found in readers.items() if found}
        nbytes = self.sizes.nbytes
        in_registers = {*made} - {key for key, _ in written} - there
        stays = {*self.inputs, *self.outputs, *kept, *in_registers}
        writing = {node for _, node in written}
        # For each output node of a kernel, the inputs that the result may overwrite, by size, because a result can
        # only overwrite an input of equal size.
        free: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        for key, moment in last.items():
            if key not in stays and (node := kernels.overwriter(readers[key], moment, writing)):
                free[node, nbytes[key]].append(key)
        found = {}
        for key, node in reversed(written):
            moment = kernels.first(node)
            if kernels.fuses[node] and (overwritten := free.get((node, nbytes[key]))):
                # The kernel reads this input for the last time. The bytes count as those of the result.
                last[overwritten.pop()] -= 1
            found[key] = (node, moment)
            last[key] = max(last.get(key, moment), moment)
        return found, last

    def _uses(
        self,
        nodes: list[fx.Node],
        made: dict[int, tuple[fx.Node, int]],
        passed_on: dict[fx.Node, bool],
    ) -> tuple[dict[fx.Node, list[int]], dict[int, list[fx.Node]], set[int]]:
        """Find the storages that the nodes of one graph allocate, read and return.

        Args:
            nodes: the call nodes of the graph.
            made: by storage key, the node that allocates the storage and its moment.
            passed_on: by node, whether the node is a view or an element of a tuple.

        Returns:
            Three collections. The first has for each node the keys of the storages that the node
            allocates. The second has for each storage key the nodes that read the storage. The
            third has the keys of the storages that the graph returns.
        """
        makes: dict[fx.Node, list[int]] = defaultdict(list)
        for key, (node, _) in made.items():
            makes[node].append(key)
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if not passed_on[node]:
                read_by = (read for read in inputs_of(node) if not _fills(read, node))
                for key in (key for read in read_by for key in self.sizes.keys(read)):
                    readers[key].append(node)
        kept = {key for n in nodes if id(n) in self._kept for key in self.sizes.keys(n)}
        return makes, readers, kept


class _Kernels:
    """Predicted kernels of a forward or backward graph, and the moments at which they run.

    Each operator that cannot fuse ends a segment of the graph. The operators that fuse within a
    segment form one kernel, which runs at the position of its last operator. A moment is the index
    of a node's run among all runs of the step.

    Args:
        nodes: the call nodes of the graph.
        start: moment of the first node.
        kept: Python ``id`` of each node that the graph returns.

    Attributes:
        fuses: by node, whether the node can fuse with other nodes.
        passed_on: by node, whether the node is a view or an element of a tuple.
    """

    def __init__(self, nodes: list[fx.Node], start: int, kept: set[int]) -> None:
        # Results are cached, because each is needed many times per node, and a search predicts dozens of plans.
        self.passed_on = {n: is_passed_on(n) for n in nodes}
        self._numel = functools.cache(_numel)
        self._producer = functools.cache(producer_of)
        self.fuses = {
            n: may_fuse(n) or ops.packet(n.target) in _INDEXED or _is_summed_product(n)
            for n in nodes
        }
        self._order = {n: k for k, n in enumerate(nodes)}
        self._segments: dict[fx.Node, frozenset[int]] = {}
        self._moments: list[int] = [start]
        self._own: dict[fx.Node, int] = {}
        #: For each node, the first segment that can read the node's result, and whether the kernel of this
        #: segment computes the result.
        self._ready: dict[fx.Node, tuple[int, bool]] = {}
        #: Segments of the kernels that read a value, by (node that computes the value, number of elements that
        #: the kernel computes).
        self._read_at: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        #: `_reads` maps a node to the values that are read from memory for its result. `_heavy` says whether the
        #: result needs an expensive operator. Both include inlined inputs, which the node's kernel computes.
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._heavy: dict[fx.Node, bool] = {}
        #: For each node, whether every kernel that reads its result computes the result again, so that no
        #: kernel writes the result.
        self._inlined: dict[fx.Node, bool] = {}
        #: For each addition that Inductor merges with a matrix product, the product. Both run at the position
        #: of the addition.
        self._products = {add: mm for add in nodes if (mm := _added_product(add)) is not None}
        # Such a sum becomes part of an `addmm`, which is a kernel of its own and fuses with no
        # node.
        self.fuses |= dict.fromkeys(self._products, False)
        self._inside = {*self._products.values()}
        heavy = dict(zip(nodes, by_target(nodes, _is_heavy), strict=True))
        plain = by_target(nodes, ops.is_plain)
        self._draws = {
            n for n, p in zip(nodes, plain, strict=True) if not p and ops.draws_in_order(n)
        }
        segment = 0
        for moment, node in enumerate(nodes, start):
            self._segments[node] = frozenset((self._segment(node, segment),))
            if self.fuses[node]:
                if segment in self._segments[node]:
                    self._moments[segment] = moment
            elif not self.passed_on[node]:
                self._own[node] = moment
                if node in self._products:
                    self._own[self._products[node]] = moment
                segment += 1
                self._moments.append(moment + 1)
            given = inputs_of(node)
            inlined = [n for n in given if self._inlined.get(n) and id(n) not in kept]
            self._reads[node] = frozenset().union(
                *(self._reads[n] if n in inlined else (self._producer(n),) for n in given)
            )
            self._heavy[node] = heavy[node] or any(self._heavy[n] for n in inlined)
            self._inlined[node] = self._inlines(node)

    def _segment(self, node: fx.Node, now: int) -> int:
        """Return the number of the segment in which a node runs.

        A segment is a part of the graph between two operators that never fuse. A fusible operator
        joins the kernel of an earlier segment in two cases. In the first case, the kernel computes
        one of the operator's inputs, and no other input is computed later. In the second case, the
        kernel reads an input of the operator and computes as many elements as the operator. In any
        other case, the node runs in segment ``now``.

        The method also records which kernels later nodes may join.

        Args:
            node: the node.
            now: number of the current segment.
        """
        given = [self._ready[n] for n in inputs_of(node) if n in self._ready]
        ready = max((at for at, _ in given), default=0)
        joins = (ready, True) in given
        if self.passed_on[node]:
            self._ready[node] = ready, joins
        elif not self.fuses[node]:
            self._ready[node] = now + 1, False
        else:
            at = ready if joins else self._beside(node, ready, now)
            if at is None:
                at = now
                self._ready[node] = ready, ready == now
            else:
                self._pull(inputs_of(node), at)
                self._ready[node] = at, True
            for read in inputs_of(node):
                self._read_at[self._producer(read), self._numel(node)].append(at)
            return at
        return now

    def _beside(self, node: fx.Node, ready: int, now: int) -> int | None:
        """Return the first earlier segment whose kernel shares an input with the node.

        The node can join this kernel, because both compute the same number of elements.

        Args:
            node: the node.
            ready: first segment in which all inputs of the node are available.
            now: current segment, which is excluded.

        Returns:
            Number of the segment; None if no segment has such a kernel.
        """
        size = self._numel(node)
        found = (
            at
            for read in inputs_of(node)
            for at in self._read_at.get((self._producer(read), size), ())
        )
        return min((at for at in found if ready <= at < now), default=None)

    def _pull(self, read: Iterable[fx.Node], to: int) -> None:
        """Move nodes and, recursively, their inputs from later segments into segment ``to``.

        Nodes in segment ``to`` or in an earlier segment are not moved.

        Args:
            read: nodes that the kernel of segment ``to`` reads.
            to: number of the segment.
        """
        waiting = [*read]
        while waiting:
            node = waiting.pop()
            if node in self._segments and min(self._segments[node]) > to:
                self._segments[node] = frozenset((to,))
                waiting += inputs_of(node)

    def overwriter(
        self, readers: Iterable[fx.Node], moment: int, writing: Container[fx.Node]
    ) -> fx.Node | None:
        """Return the output node whose result may overwrite a storage that its kernel reads last.

        An output node is a node whose result the kernel writes to memory. The search for the output
        nodes that read the storage begins at the readers of the storage in this kernel. If a
        reader's result stays in registers, the search continues with the nodes that read this
        result.

        Args:
            readers: nodes that read the storage.
            moment: moment at which the storage is read for the last time.
            writing: nodes whose results are written to memory.

        Returns:
            The last of these output nodes. None if there is none, or if the last one does not depend
            on all others: Inductor then lets no result overwrite the storage.
        """
        found: set[fx.Node] = set()
        waiting = [n for n in readers if self.last(n) == moment]
        seen = {*waiting}
        while waiting:
            node = waiting.pop()
            if node in writing or not self.fuses[node]:
                found.add(node)
            else:
                new = {n for n in readers_of(node) if n in self.fuses} - seen
                waiting += new
                seen |= new
        if len(found) < 2:
            return found.pop() if found else None
        last = max(found, key=self._order.__getitem__)
        return last if self._depends_on(last, found - {last}) else None

    def _depends_on(self, node: fx.Node, others: set[fx.Node]) -> bool:
        """Return whether a node depends on all ``others``, which come before the node."""
        first = min(map(self._order.__getitem__, others))
        waiting, seen = [node], {node}
        while waiting:
            new = {n for n in inputs_of(waiting.pop()) if self._order.get(n, -1) >= first} - seen
            waiting += new
            seen |= new
        return others <= seen

    def first(self, node: fx.Node) -> int:
        """Return the moment at which the first of the kernels that compute a node runs."""
        return self._own[node] if node in self._own else self._moments[min(self._segments[node])]

    def last(self, node: fx.Node) -> int:
        """Return the moment at which the last of the kernels that compute a node runs."""
        return self._own[node] if node in self._own else self._moments[max(self._segments[node])]

    def _inlines(self, node: fx.Node) -> bool:
        """Return whether every kernel that reads a node's result computes the result again.

        No kernel writes such a result to memory. An operand of ``as_strided`` is always written.

        Call this method after the inputs of the node have been processed.
        """
        if not self.fuses[node] or not self._is_pointwise(node):
            return self.passed_on[node]
        if any(ops.packet(u.target) is torch.ops.aten.as_strided for u in node.users):
            return False
        alone = len(node.users) < 2
        return alone or (len(self._reads[node]) <= _MOST_READS and not self._heavy[node])

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Return whether no input of a node has more elements than the node's result.

        Always False for operators that draw random numbers.
        """
        largest = max(map(self._numel, inputs_of(node)), default=0)
        return largest <= self._numel(node) and node not in self._draws

    def _is_summed_at_once(self, node: fx.Node, at: frozenset[int]) -> bool:
        """Return whether a sum in backward runs in a kernel of its own, before its readers.

        True if the first reader is more than `NEAR_SUMS` segments later. remat forbids Inductor to
        fuse such a sum with its readers; see `remat.integrations.near_fusions`.

        Args:
            node: the node; the result is False if it is not a sum in backward.
            at: numbers of the segments in which the node's readers run.
        """
        if not at or not node.meta.get("autograd_backward") or self._is_pointwise(node):
            return False
        smaller = self._numel(node) < max(map(self._numel, inputs_of(node)), default=0)
        return smaller and min(at) > max(self._segments[node]) + NEAR_SUMS

    def place(
        self, node: fx.Node, keys: list[int], readers: dict[int, list[fx.Node]], kept: set[int]
    ) -> list[int]:
        """Move a node into the kernels that read its results, if these kernels can compute the node.

        Args:
            node: the node.
            keys: keys of the storages that the node allocates.
            readers: by storage key, the nodes that read the storage.
            kept: keys of the storages that the graph returns.

        Returns:
            Those of ``keys`` whose storages are written to memory. The other results stay in
            registers.
        """
        if not self.fuses[node]:
            return [] if node in self._inside else keys
        flows = [
            k
            for k in keys
            if k not in kept and all(self.fuses[r] or _is_scatter(r.target) for r in readers[k])
        ]
        at = frozenset(s for k in flows for r in readers[k] for s in self._segments[r])
        if self._is_summed_at_once(node, at):
            at = frozenset()
        if at and len(flows) == len(keys) and (len(at) == 1 or self._inlined[node]):
            self._segments[node] = at
        mine = self._segments[node]
        return [
            k
            for k in keys
            if k not in flows or any(not self._segments[r] <= mine for r in readers[k])
        ]


def _is_image(node: fx.Node) -> bool:
    """Return whether a node's value is a four-dimensional tensor, as convolutions of images read."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _is_reshaped(node: fx.Node) -> bool:
    """Return whether a convolution on a CPU reads a copy of a node's value in another layout.

    True if the value is a view of a fused result of another shape. Inductor makes such a result
    contiguous, also if the traced one is not, and convolutions read channels-last values.
    """
    producer = producer_of(node)
    if not _is_image(node) or producer.op != "call_function" or not may_fuse(producer):
        return False
    value, made = node.meta["val"], producer.meta.get("val")
    if value.device.type != "cpu" or not isinstance(made, torch.Tensor):
        return False
    in_order = value.is_contiguous(memory_format=torch.channels_last) and made.is_contiguous()
    return made.shape != value.shape and not in_order


def _keeps_its_layout(node: fx.Node) -> bool:
    """Return whether Inductor keeps the traced layout of a value that ``convolution_backward`` reads.

    The operator then reads a channels-last copy on a CPU. True if several nodes read the value, and
    the value is fused and was not channels-last when traced.
    """
    if not _is_image(node) or len(node.users) < 2 or not may_fuse(node) or is_passed_on(node):
        return False
    value = node.meta["val"]
    in_order = value.is_contiguous(memory_format=torch.channels_last)
    return value.device.type == "cpu" and not in_order


def _weight_for_its_sizes(node: fx.Node) -> Any:
    """Return the weight argument of a ``convolution_backward`` that reads only the weight's sizes.

    Such a node does not compute the gradient of the convolution's input. None for other nodes.
    """
    of_backward = "convolution_backward" in str(node.target) and len(node.args) > _OUTPUT_MASK
    return node.args[2] if of_backward and not node.args[_OUTPUT_MASK][0] else None  # type: ignore[index]


def _fills(read: fx.Node, node: fx.Node) -> bool:
    """Return whether Inductor never allocates the constant tensor ``read``.

    True if ``node`` is an out-of-place index write or scatter into ``read``. Inductor then fills
    the result with the constant instead of copying ``read``.

    Args:
        read: the constant tensor, an input of ``node``.
        node: the node that writes into a copy of ``read``.
    """
    return (
        read.target is torch.ops.aten.full.default
        and read is node.args[0]
        and _is_scatter(node.target)
    )


@functools.cache
def _is_scatter(target: Any) -> bool:
    """Return whether an operator is an out-of-place index write or scatter.

    Its kernel computes the written values, if they are results of fusible operators.
    """
    name = str(target).split(".")[1:2]
    return any(part in n and n[-1] != "_" for n in name for part in ("index_put", "scatter"))


def _is_summed_product(node: fx.Node) -> bool:
    """Return whether Inductor computes a batched matrix product by multiplying and summing.

    True on a CPU if the products have one row or one column.
    """
    value = node.meta.get("val")
    if node.target is not torch.ops.aten.bmm.default or not isinstance(value, torch.Tensor):
        return False
    return value.device.type == "cpu" and any(hint(n) <= 1 for n in value.shape[1:])


def _workspace(node: fx.Node) -> int:
    """Return the predicted bytes of the memory for partial results that a node needs on a CPU.

    0 for operators without such memory, and on other devices. A three-dimensional convolution of
    contiguous values also copies its result, and its backward copies the gradient and the input.
    """
    needs = _workspace_of(node.target)
    if needs is None:
        return 0
    argument, times = needs
    read = [a for a in node.args if isinstance(a, fx.Node)]
    value = read[argument].meta.get("val") if argument < len(read) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return 0
    nbytes = times * tensor_bytes(value)
    if value.dim() == _OF_VOLUMES:
        backward = "convolution_backward" in str(node.target)
        copied = (n.meta["val"] for n in (read[:2] if backward else [node]))
        nbytes += sum(tensor_bytes(v) for v in copied if v.is_contiguous())
    return nbytes


@functools.cache
def _workspace_of(target: Any) -> tuple[int, int] | None:
    """Return the last two items of an operator's entry in `_WORKSPACES`; None if it has no entry."""
    name = str(target)
    return next((needs for part, *needs in _WORKSPACES if part in name), None)  # type: ignore[return-value]


def _added_product(node: fx.Node) -> fx.Node | None:
    """Return the matrix product that Inductor merges with an addition into one ``addmm``.

    None if the node is not such an addition, or if another node reads the product too.
    """
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
        # On a GPU, Inductor keeps the sum out of the product if the sum can fuse with all its readers
        # (`should_prefer_unfused_addmm`).
        if alike and (made.device.type == "cpu" or not all(map(may_fuse, node.users))):
            return product
    return None


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether a shape can be expanded to another shape of at least as many dimensions."""
    ends = zip(reversed([hint(n) for n in shape]), reversed([hint(n) for n in to]), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in ends)


def _is_heavy(node: fx.Node) -> bool:
    """Return whether a node is an expensive pointwise operator, such as ``exp`` or ``tanh``."""
    name = str(node.target)
    return any(f".{op}." in name for op in _HEAVY)


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0
