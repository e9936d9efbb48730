"""Predict the lifetimes of storages in fused code, from the forward and backward graphs alone.

Fused code differs from the model of `remat.graph.memory.liveness` in three respects. A pointwise result
that only one kernel reads is never written to memory, because this kernel computes the result
itself. A kernel may write its result over an input that no later node reads. Convolutions and
attention allocate workspaces besides their results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.fusion import INDEXED, is_passed_on, is_scatter, may_fuse, producer_of
from remat.graph.index import inputs_of
from remat.graph.memory.fused_kernels import Kernels, numel
from remat.graph.memory.liveness import StepWalk
from remat.graph.memory.storages import MEASURE, hint, tensor_bytes

#: Index of the argument ``output_mask`` of ``convolution_backward``. The first two entries of this mask say whether the
#: gradients of the convolution's input and weight are computed.
_OUTPUT_MASK = 10
#: Fused operators whose results are contiguous, whatever the format of their inputs.
_CONTIGUOUS = (*INDEXED, torch.ops.aten.cat)


class FusedWalk(StepWalk):
    """Simulation of a step's memory that models fused kernels, unlike its base class `StepWalk`."""

    def workspaces(self) -> Iterator[tuple[fx.Node, int, int, int]]:
        """Yield the predicted workspaces, as (node, bytes, first program point, last program point).

        A workspace is memory that an operator needs besides its inputs and its result. Some operators allocate a
        workspace of a measured size while they run. A convolution may read channels-last copies of its inputs, and
        such copies are workspaces. If a weight is copied, its gradient is a workspace until the next kernel writes
        the gradient in the weight's format.
        """
        begun: dict[tuple[bool, fx.Node], int] = {}
        aten, called = torch.ops.aten, {n.target for n in self._backward}
        leaves = aten.convolution_backward.default in called
        # Before PyTorch 2.15, a backward that recomputes no convolution makes no such copies for a
        # `convolution_backward` whose input is contiguous. The operator then copies its inputs while it runs.
        leaves = leaves and aten.convolution.default not in called
        # From 2.15 on, Inductor's `decide_layout_opt` counts `convolution_backward` as a convolution.
        leaves = leaves and torch_compat.is_before("2.15")
        contiguous = self._contiguous() if leaves else set()
        computed: dict[fx.Node, int] = {}
        for program_point, node in self.running():
            computed[node] = program_point
            nbytes = _workspace(node, node not in contiguous)
            if nbytes:
                yield node, nbytes, program_point, program_point
            if node in contiguous or "convolution" not in str(node.target):
                continue
            sizes = _weight_for_its_sizes(node)
            for a in (a for a in node.all_input_nodes if a is not sizes and self._is_copied(a)):
                # Forward makes all copies of an input before the first convolution that reads it. Backward does the
                # same.
                first = begun.setdefault(
                    (program_point < self.boundary, a), self._kernel_before(program_point)
                )
                yield node, tensor_bytes(a.meta.get("val")), first, program_point
            # The kernel that computes the value makes the copy, and only the copy stays alive.
            for a in filter(_is_reshaped, node.all_input_nodes):
                at = self._end_of_kernel(computed[producer_of(a)])
                yield node, tensor_bytes(a.meta.get("val")), at, at
            if "convolution_backward" in str(node.target):
                arguments: Any = node.args
                weight, mask = arguments[2], arguments[_OUTPUT_MASK]
                if mask[1] and self._is_copied(weight):
                    # The gradient has the format of the copy. A kernel then writes it in the format of the weight.
                    at = self._end_of_kernel(program_point)
                    yield node, tensor_bytes(weight.meta["val"]), at, at
                # Other nodes read the value too, as with the gradient of a residual sum, so value and copy are
                # alive.
                for a in filter(_keeps_its_layout, node.all_input_nodes[:2]):
                    yield node, tensor_bytes(a.meta.get("val")), computed[a], program_point

    def _end_of_kernel(self, program_point: int) -> int:
        """Return the last program point before the next node that never fuses, or else the last of the step."""
        ran = [*self._forward, *self._backward]
        later = enumerate(ran[program_point + 1 :], program_point)
        return next((m for m, n in later if not (may_fuse(n) or is_passed_on(n))), len(ran) - 1)

    def _kernel_before(self, program_point: int) -> int:
        """Return the program point of the kernel right before an operator, or else the operator's own program point."""
        ran = [*self._forward, *self._backward]
        follows = (
            program_point != self.boundary and program_point and may_fuse(ran[program_point - 1])
        )
        return program_point - 1 if follows else program_point

    def _is_copied(self, node: fx.Node) -> bool:
        """Return whether a value is an input image that convolutions copy, because it is not channels-last."""
        if not _is_image(node) or not any(key in self.inputs for key in self.sizes.keys(node)):
            return False
        return not node.meta["val"].is_contiguous(memory_format=torch.channels_last)

    def _contiguous(self) -> set[fx.Node]:
        """Return each ``convolution_backward`` that runs on a CPU and has a contiguous input."""
        channels_last: set[fx.Node] = set()

        def is_channels_last(node: fx.Node) -> bool:
            node = producer_of(node)
            is_given = node.op == "placeholder" and _is_image(node) and not self._is_copied(node)
            return is_given or node in channels_last

        contiguous = set()
        for node in self._backward:
            if node.target is torch.ops.aten.convolution_backward.default:
                given = node.all_input_nodes[:2][-1]
                on_cpu = _is_image(given) and given.meta["val"].device.type == "cpu"
                if on_cpu and not is_channels_last(given):
                    contiguous.add(node)
            # Forward saves what it computes in channels-last format. A fused result has the format of its inputs,
            # unless it concatenates or indexes them.
            if ops.packet(node.target) in _CONTIGUOUS:
                continue
            if not may_fuse(node):
                channels_last.add(node)
            elif _is_image(node):
                size = numel(node)
                if any(numel(n) >= size and is_channels_last(n) for n in inputs_of(node)):
                    channels_last.add(node)
        return contiguous

    def _walk(
        self, nodes: list[fx.Node], start: int, existing: set[int]
    ) -> tuple[dict[int, tuple[fx.Node, int]], dict[int, int]]:
        allocations, _ = super()._walk(nodes, start, existing)
        returned_nodes = {n for n in nodes if any(u.op == "output" for u in n.users)}
        kernels = Kernels(nodes, start, returned_nodes)
        returned = {key for n in returned_nodes for key in self.sizes.keys(n)}
        # The storage keys that each node allocates, and the nodes that read each storage.
        makes: dict[fx.Node, list[int]] = defaultdict(list)
        for key, (node, _) in allocations.items():
            makes[node].append(key)
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            for read in () if kernels.passed_on[node] else inputs_of(node):
                for key in () if _fills(read, node) else self.sizes.keys(read):
                    readers[key].append(node)
        written = [  # readers first, because a node moves to the kernels of its readers
            (key, node)
            for node in reversed(nodes)
            for key in kernels.place(node, makes[node], readers, returned)
        ]
        last = {
            key: max(map(kernels.last, in_memory))
            for key, in_memory in readers.items()
            if in_memory
        }
        nbytes = self.sizes.nbytes
        in_registers = {*allocations} - {key for key, _ in written} - existing
        # Inductor marks a result as written in place by a scatter, and lets no other result overwrite it.
        scattered = {key for key, (node, _) in allocations.items() if is_scatter(node.target)}
        stays = {*self.inputs, *self.outputs, *returned, *in_registers, *scattered}
        writing = {node for _, node in written}
        # For each output node of a kernel, the inputs that the result may overwrite, by size, because a result can
        # only overwrite an input of equal size.
        free: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        for key, program_point in last.items():
            if key not in stays:
                output = kernels.overwriter(readers[key], program_point, writing)
                if output is not None:
                    free[output, nbytes[key]].append(key)
        in_memory = {}
        for key, node in reversed(written):
            program_point = kernels.first(node)
            if kernels.fuses[node] and (overwritten := free.get((node, nbytes[key]))):
                # The kernel reads this input for the last time. The bytes count as those of the result.
                last[overwritten.pop()] -= 1
            in_memory[key] = (node, program_point)
            last[key] = max(last.get(key, program_point), program_point)
        return in_memory, last


def _is_image(node: fx.Node) -> bool:
    """Return whether a node's value is a four-dimensional tensor, as convolutions of images read."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _is_reshaped(node: fx.Node) -> bool:
    """Return whether a convolution on a CPU reads a copy of a node's value in another layout."""
    producer = producer_of(node)
    if not _is_image(node) or producer.op != "call_function" or not may_fuse(producer):
        return False
    value, traced = node.meta["val"], producer.meta.get("val")
    if value.device.type != "cpu" or not isinstance(traced, torch.Tensor):
        return False
    # Inductor makes a fused result contiguous, also if the traced one is not, and convolutions read channels-last
    # values.
    in_order = value.is_contiguous(memory_format=torch.channels_last) and traced.is_contiguous()
    return traced.shape != value.shape and not in_order


def _keeps_its_layout(node: fx.Node) -> bool:
    """Return whether a fused CPU value keeps a layout other than channels-last, because it has several readers."""
    if not _is_image(node) or len(node.users) < 2 or not may_fuse(node) or is_passed_on(node):
        return False
    value = node.meta["val"]
    in_order = value.is_contiguous(memory_format=torch.channels_last)
    return value.device.type == "cpu" and not in_order


def _weight_for_its_sizes(node: fx.Node) -> Any:
    """Return the weight of a ``convolution_backward`` that reads only the sizes of the weight; None for other nodes."""
    of_backward = "convolution_backward" in str(node.target) and len(node.args) > _OUTPUT_MASK
    return node.args[2] if of_backward and not node.args[_OUTPUT_MASK][0] else None  # type: ignore[index]


def _fills(read: fx.Node, node: fx.Node) -> bool:
    """Return whether ``read`` is a constant that Inductor only writes into the result of the scatter ``node``."""
    return (
        read.target is torch.ops.aten.full.default
        and read is node.args[0]
        and is_scatter(node.target)
    )


def _workspace(node: fx.Node, channels_last: bool) -> int:
    """Return the bytes that an operator allocates in compiled code, beyond the bytes of its results."""
    measure = node.meta.get(MEASURE)
    return 0 if measure is None or may_fuse(node) else hint(measure(channels_last))
