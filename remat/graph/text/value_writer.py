"""Values of nodes as types: ``f32[8, 4](1, 8)``, with what shares memory with what."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.storages import storage_key
from remat.graph.text.expressions import Size, size_of, write_expression
from remat.graph.text.literals import Writer
from remat.graph.text.opaque import write_opaque
from remat.graph.text.values import base_of, contiguous, element, equal, extent


class ValueWriter:
    """Writes the values of the nodes of one graph, in their order.

    Args:
        literals: writes constants, and takes up symbols.
        device: the device that need not be said.
        graph: what the graph is called, with those around it: ``"joint.true_graph_0"``.
    """

    def __init__(self, literals: Writer, device: torch.device, graph: str) -> None:
        self._literals = literals
        self._symbols = literals.symbols
        self._device = device
        self._graph = graph
        self._places: dict[int, tuple[str, str]] = {}  # by storage: the first tensor on it

    def nested(self, name: str) -> ValueWriter:
        """A writer for a subgraph, whose values may share memory with those outside."""
        inner = ValueWriter(self._literals, self._device, f"{self._graph}.{name}")
        inner._places = self._places
        return inner

    def write(self, node: fx.Node) -> str:
        """The type of a node's value."""
        return self._write(node.meta["val"], node.name, base_of(node))

    def constant(self, tensor: torch.Tensor) -> str:
        """The type of a tensor in memory of its own, whatever else is on it."""
        return self._tensor(tensor, owns=True)

    def _write(self, value: Any, place: str, base: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._placed(value, place, base)
        if isinstance(value, (tuple, list)):
            parts = [self._write(v, f"{place}[{k}]", element(base, k)) for k, v in enumerate(value)]
            if isinstance(value, list):
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if value is None:
            return "None"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._literals.write(value)
        if type(value) in (bool, int, float, complex, str, torch.dtype, torch.device):
            return f"const({self._literals.write(value)})"
        if isinstance(value, torch_compat.BackwardState):
            return "backward_state"
        return write_opaque(value)

    def _placed(self, tensor: torch.Tensor, place: str, base: Any) -> str:
        """A tensor and the memory it lies in, where that is not what one would expect."""
        key = storage_key(tensor)
        if key is None:
            return self._tensor(tensor, owns=True)
        expected = storage_key(base)
        here = (self._graph, place)
        graph, owner = self._places.setdefault(key, here)
        if (graph, owner) == here:
            own = self._tensor(tensor, owns=True)
            return own if expected is None else f"{own} @ None"
        shared = self._tensor(tensor, owns=False)
        if key == expected:
            return shared
        return f"{shared} @ {owner if graph == self._graph else f'{graph}.{owner}'}"

    def _tensor(self, tensor: torch.Tensor, *, owns: bool) -> str:
        name = torch_compat.dtype_abbrs.get(tensor.dtype)
        wrapped = bool(torch_compat.is_traceable_wrapper_subclass(tensor))
        if name is None or wrapped:
            raise ProblemError(
                f"a {type(tensor).__name__} of {tensor.dtype} has no text form: expected a plain "
                "tensor, as AOTAutograd leaves them in joint graphs"
            )
        sizes = [size_of(s) for s in tensor.shape]
        text = f"{name}[{', '.join(map(self._size, sizes))}]" if sizes else name
        extra: list[str] = []
        if tensor.layout is not torch.strided:
            extra.append(f"layout={tensor.layout}")
        else:
            extra += self._memory(tensor, sizes, owns)
        if tensor.device != self._device:
            extra.append(f'device="{tensor.device}"')
        if tensor.requires_grad:
            extra.append("grad=True")
        return f"{text}({', '.join(extra)})" if extra else text

    def _memory(self, tensor: torch.Tensor, sizes: list[Size], owns: bool) -> list[str]:
        """Strides, offset and bytes of the memory, where they do not follow from the sizes."""
        said: list[str] = []
        strides = tuple(size_of(s) for s in tensor.stride())
        if strides != contiguous(sizes):
            said += map(self._size, strides)
        offset = size_of(tensor.storage_offset())
        if offset != 0:
            said.append(f"offset={self._size(offset)}")
        if owns:
            nbytes = size_of(tensor.untyped_storage().nbytes())
            if not equal(nbytes, extent(sizes, strides, offset, tensor.element_size())):
                said.append(f"storage={self._size(nbytes)}")
        return said

    def _size(self, size: Size) -> str:
        return str(size) if type(size) is int else write_expression(size, self._symbols)
