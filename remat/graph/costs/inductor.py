"""Roofline of the kernels that Inductor's scheduler would form, without compiling them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import fx

from remat import torch_compat
from remat.graph.costs.auto import preset_for
from remat.graph.costs.base import CostModel, report
from remat.graph.costs.fused import (
    Fuse,
    RooflineFused,
    fuse,
    is_written,
    may_fuse,
    moved_by,
    readers_of,
)
from remat.graph.costs.roofline import Roofline, all_bytes
from remat.graph.joint import JointGraph
from remat.graph.storages import fake_mode_of, form_of, tensor_bytes, tensors_of

_LOG = logging.getLogger(__name__)

#: Map from the name of each node of a graph to the numbers of the kernels that compute the node.
Kernels = dict[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Inductor(Roofline):
    """Cost model: roofline of the kernels into which Inductor fuses a graph, in picoseconds.

    Inductor lowers the whole joint graph, and its scheduler forms the kernels for the device of the
    graph's tensors. The rates are those of this model's device. By default, this is the preset for
    the device type of the tensors.

    A node costs ``max(operations / peak, external bytes / bandwidth)``, at least 1 ps. External
    bytes are those that the node reads from, or writes for, nodes outside of its kernels. If the
    node's result stays in registers, saving the result would add a write and a read. Recomputing
    the node avoids both, so twice the bytes of the result are subtracted from the external bytes.

    Pricing takes about 3 ms per node. If Inductor cannot lower a graph, `RooflineFused` prices the
    graph.

    Attributes:
        by_tensors: True if the user names no device. `on` then takes the rates from the preset for
            the device type of the graph's tensors.
    """

    by_tensors: bool = False

    name: ClassVar[str] = "inductor"
    summary: ClassVar[str] = (
        "roofline of the kernels that Inductor would form; asks it, 3 ms a node"
    )
    contextual: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        """Build the model from a device, such as ``h100``, ``cpu``, ``here`` or ``FILE.toml``.

        If ``argument`` is None, the rates come from the preset for the graph's device.

        Raises:
            ProblemError: the device is unknown, or the file is unusable.
        """
        return cls(by_tensors=True) if argument is None else super(Inductor, cls).parse(argument)

    def on(self, joint: JointGraph) -> CostModel:
        """Return the model for one graph, with the rates of the preset for the graph's device.

        A model with a named device is returned unchanged.
        """
        if not self.by_tensors:
            return self
        return Inductor(preset_for(joint))

    def __str__(self) -> str:
        return self.name if self.by_tensors else super(Inductor, self).__str__()

    def cost(self, node: fx.Node) -> int:
        """Return the time of one run of a node in picoseconds.

        Inductor forms kernels for the node's whole graph.
        """
        return self.costs([node])[0]

    def costs(self, nodes: Sequence[fx.Node]) -> Sequence[int]:
        """Return the time of one run of each node, in picoseconds.

        All nodes must belong to one graph.
        """
        if not nodes:
            return []
        report(f"asking Inductor for the kernels of {len(nodes)} operators")
        kernels = kernels_of(nodes[0].graph)
        if kernels is None:
            other = RooflineFused(self.device, self.source)
            return [other.cost(n) for n in nodes]
        together = _together(kernels)
        return [self._cost(n, together) for n in nodes]

    def fallbacks(self, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
        if nodes and kernels_of(nodes[0].graph) is None:
            return ("Inductor does not lower this graph by itself: priced by 'roofline-fused'",)
        return ()

    def _cost(self, node: fx.Node, together: Fuse) -> int:
        if not may_fuse(node):
            return self.of(node, all_bytes(node))
        moved = moved_by(node, together)
        if not is_written(node, node, together):
            moved -= 2 * tensor_bytes(node.meta.get("val"))
        return self.of(node, max(0, moved))


def _together(kernels: Kernels) -> Fuse:
    """Return a predicate of two nodes: whether they may fuse and Inductor puts them into one kernel.

    Args:
        kernels: set of kernel ids by node name, as `kernels_of` returns it.
    """
    none: frozenset[int] = frozenset()

    def share(a: fx.Node, b: fx.Node) -> bool:
        return fuse(a, b) and bool(kernels.get(a.name, none) & kernels.get(b.name, none))

    return share


#: Cache of `kernels_of`: for each graph, its hash when Inductor lowered it, and the kernels. A graph whose hash
#: has changed since then is lowered again.
_KNOWN: weakref.WeakKeyDictionary[fx.Graph, tuple[int, Kernels | None]] = (
    weakref.WeakKeyDictionary()
)


def kernels_of(graph: fx.Graph) -> Kernels | None:
    """Return the kernels that compute each node: a set of kernel ids by node name.

    None if Inductor cannot lower the graph.

    Operators that Inductor calls from a library, such as products, are kernels of their own. A
    node whose result is not written belongs to each kernel that reads the result.
    """
    # A graph's text has no shapes, but they decide how Inductor fuses.
    values = (tensors_of(node.meta.get("val")) for node in graph.nodes)
    now = hash((str(graph), *(tuple(map(form_of, v)) for v in values)))
    known = _KNOWN.get(graph)
    if known is None or known[0] != now:
        known = _KNOWN[graph] = (now, _asked(graph))
    return known[1]


def _asked(graph: fx.Graph) -> Kernels | None:
    """Return the kernel ids of each node by name, from Inductor; None if Inductor raises."""
    try:
        with torch.no_grad():
            written = _written_by(_copy(graph))
    except Exception:  # Inductor may raise anything for a graph that it does not expect
        _LOG.info("Inductor does not lower this graph", exc_info=True)
        return None
    found: Kernels = {}
    none: frozenset[int] = frozenset()
    for node in reversed(graph.nodes):
        if node.name in written:
            found[node.name] = frozenset(written[node.name])
        else:
            found[node.name] = none.union(*(found.get(r.name, none) for r in readers_of(node)))
    return found


def _written_by(module: fx.GraphModule) -> dict[str, set[int]]:
    """Return the kernels that write each node's result to memory.

    Returns:
        Set of kernel ids by node name. Nodes whose results are not written are missing.
    """
    place = {node.name: k for k, node in enumerate(module.graph.nodes)}
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    # As in `compile_fx`: layout optimisation may change strides, and `view` fails for some strides.
    torch_compat.view_to_reshape(module)  # type: ignore[no-untyped-call]
    state = torch_compat.INDUCTOR
    found: dict[str, set[int]] = {}
    mode = fake_mode_of(inputs)
    with state.set_fake_mode(mode), state.set_debug_handler(torch_compat.DebugContext()):
        lowering = torch_compat.GraphLowering(
            module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=False
        )
        with state.set_graph_handler(lowering), state.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            scheduled = torch_compat.schedule(lowering)
        for k, kernel in enumerate(scheduled):
            for part in kernel.get_nodes():
                made_for = [] if part.node is None else part.node.get_origins()
                # A buffer's origins are the node that it stores and the nodes inlined into it. The stored node
                # is the last of them in graph order.
                last = max((place.get(n.name, -1) for n in made_for), default=-1)
                if last >= 0:
                    name = next(n.name for n in made_for if place.get(n.name) == last)
                    found.setdefault(name, set()).add(k)
    return found


def _copy(graph: fx.Graph) -> fx.GraphModule:
    """Return a copy of the graph as a module that returns its outputs as one list."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return fx.GraphModule(graph.owning_module or {}, copy)
