"""Types of values read as fake values: ``f32[8, 4](1, 8)`` as a fake tensor on its own memory."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from remat import torch_compat
from remat.graph.storages import storage_key
from remat.graph.text.expressions import Expressions, Size, size_of
from remat.graph.text.fakes import Fakes
from remat.graph.text.literals import CONSTANTS, Reader
from remat.graph.text.opaque import read_opaque
from remat.graph.text.syntax import Source, arguments, call_name
from remat.graph.text.values import base_of, contiguous, element, extent
from remat.torch_compat import dtype_abbrs

_DTYPES = {name: dtype for dtype, name in dtype_abbrs.items()}
_SYMBOLIC = ("SymInt", "SymFloat", "SymBool")
_LARGEST = 2**63 - 1
_MAX_RANK = 64


@dataclass(slots=True)
class _Type:
    """A type of a tensor, as far as it is written."""

    dtype: torch.dtype
    sizes: list[Size]
    device: torch.device
    strides: tuple[Size, ...] = ()
    offset: Size = 0
    storage: Size | None = None
    layout: torch.layout = torch.strided
    grad: bool = False


class ValueReader:
    """Reads the values of the nodes of one graph, in their order.

    Args:
        source: the text.
        fakes: makes fake values.
        expressions: reads sizes.
        device: the device that need not be said.
        graph: what the graph is called, with those around it: ``"joint.true_graph_0"``.
    """

    def __init__(
        self,
        source: Source,
        fakes: Fakes,
        expressions: Expressions,
        device: torch.device,
        graph: str,
    ) -> None:
        self._source = source
        self._fakes = fakes
        self._expressions = expressions
        self._device = device
        self._graph = graph
        self._places: dict[str, torch.Tensor] = {}
        self._literals = Reader(source, symbolic=self.symbolic)

    def nested(self, name: str) -> ValueReader:
        """A reader for a subgraph, whose values may share memory with those outside."""
        inner = ValueReader(
            self._source, self._fakes, self._expressions, self._device, f"{self._graph}.{name}"
        )
        inner._places = self._places
        return inner

    def read(self, node: fx.Node, written: ast.expr) -> Any:
        """The value that a node is written with; the node has its target and arguments."""
        return self._read(written, f"{self._graph}.{node.name}", base_of(node), 0)

    def constant(self, written: ast.expr) -> torch.Tensor:
        """A tensor in memory of its own."""
        return self._tensor(self._type(written), written, None)

    def symbolic(self, node: ast.Subscript) -> Any:
        """The symbolic number that ``SymInt[…]`` and its like stand for."""
        if not isinstance(node.value, ast.Name) or node.value.id not in _SYMBOLIC:
            raise self._source.error(
                node, self._source.quote(node), "SymInt[…], SymFloat[…], SymBool[…]"
            )
        expression = self._expressions.read(node.slice)
        if isinstance(expression, sympy.Expr) is (node.value.id == "SymBool"):
            raise self._source.error(node, self._source.quote(node), "the type of what it computes")
        try:
            return self._fakes.number(node.value.id, expression)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._source.error(
                node, f"{self._source.quote(node)}, which has no value", str(error)
            ) from error

    def _read(self, node: ast.expr, place: str, base: Any, depth: int) -> Any:
        depth = self._source.deeper(node, depth)
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [
                self._read(x, f"{place}[{k}]", element(base, k), depth)
                for k, x in enumerate(node.elts)
            ]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Name) and node.id == "backward_state":
            return torch_compat.BackwardState()
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in _SYMBOLIC:
            return self.symbolic(node)
        if call_name(node) == "opaque":
            return read_opaque(self._source, node)
        written = arguments(node, "const", 1, 1)
        if written is not None:
            return self._literals.read(written[0])
        made = self._placed(node, base)
        if storage_key(made) is not None:
            self._places[place] = made
        return made

    def _placed(self, node: ast.expr, base: Any) -> torch.Tensor:
        """A tensor in the memory that is written, or that it lies in unless something is."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
            memory = base if storage_key(base) is not None else None
            return self._tensor(self._type(node), node, memory)
        if isinstance(node.right, ast.Constant) and node.right.value is None:
            return self._tensor(self._type(node.left), node, None)
        self._source.shallow(node.right)
        place = ast.unparse(node.right)
        owner = self._places.get(f"{self._graph}.{place}", self._places.get(place))
        if owner is None:
            got = f"the memory of {self._source.quote(node.right)}"
            raise self._source.error(
                node.right, got, "that of a tensor above, such as mm or split[1]"
            )
        return self._tensor(self._type(node.left), node, owner)

    def _type(self, node: ast.expr) -> _Type:
        """What is written about a tensor."""
        call = node if isinstance(node, ast.Call) else None
        inner = node.func if isinstance(node, ast.Call) else node
        name = inner.value if isinstance(inner, ast.Subscript) else inner
        if not isinstance(name, ast.Name) or name.id not in _DTYPES:
            raise self._source.error(
                node,
                f"the type {self._source.quote(node)}",
                "one such as f32[8, 4], SymInt[s0], const(1), None, or a tuple of such",
            )
        sizes: list[Size] = []
        if isinstance(inner, ast.Subscript):
            listed = inner.slice.elts if isinstance(inner.slice, ast.Tuple) else [inner.slice]
            sizes = [self._size(x) for x in listed]
        if len(sizes) > _MAX_RANK:
            raise self._source.error(node, f"{len(sizes)} dimensions", f"{_MAX_RANK} at most")
        found = _Type(_DTYPES[name.id], sizes, self._device)
        if call is not None:
            self._details(call, found)
        if not found.strides:
            found.strides = contiguous(sizes)
        return found

    def _details(self, call: ast.Call, found: _Type) -> None:
        """What stands in parentheses behind the sizes."""
        found.strides = tuple(self._size(x) for x in call.args)
        if found.strides and len(found.strides) != len(found.sizes):
            raise self._source.error(
                call, f"{len(found.strides)} strides", f"{len(found.sizes)}, one for each dimension"
            )
        for given in call.keywords:
            if given.arg == "offset":
                found.offset = self._size(given.value)
            elif given.arg == "storage":
                found.storage = self._size(given.value)
            elif given.arg == "device":
                found.device = self._literals.device(given.value)
            elif given.arg == "grad":
                found.grad = self._grad(given.value, found.dtype)
            elif given.arg == "layout":
                found.layout = self._layout(given.value)
            else:
                raise self._source.error(
                    given, f"'{given.arg}'", "offset, storage, device, grad or layout"
                )

    def _grad(self, node: ast.expr, dtype: torch.dtype) -> bool:
        differentiable = dtype.is_floating_point or dtype.is_complex
        if not isinstance(node, ast.Constant) or node.value is not True or not differentiable:
            raise self._source.error(
                node, self._source.quote(node), "True, for a floating-point type"
            )
        return True

    def _layout(self, node: ast.expr) -> torch.layout:
        found = CONSTANTS.get(self._source.dotted(node))
        if not isinstance(found, torch.layout):
            raise self._source.error(
                node, self._source.quote(node), "a layout, such as torch.sparse_coo"
            )
        return found

    def _size(self, node: ast.expr) -> Size:
        size = self._expressions.size(node)
        known = self._hint(node, size)
        if known is not None and not 0 <= known <= _LARGEST:
            raise self._source.error(node, f"the size {known}", "one of 0 to 2**63 - 1")
        return size

    def _hint(self, node: ast.expr, size: Size) -> int | None:
        try:
            return self._fakes.hint(size)
        except (ArithmeticError, TypeError, ValueError) as error:
            got = f"the size {self._source.quote(node)}"
            raise self._source.error(node, got, f"one with a value ({error})") from error

    def _tensor(self, t: _Type, node: ast.expr, base: Any) -> torch.Tensor:
        if t.layout is not torch.strided:
            return self._made(
                node, lambda: self._fakes.sparse(t.dtype, t.sizes, t.layout, t.device)
            )
        needed = extent(t.sizes, t.strides, t.offset, t.dtype.itemsize)
        there = needed if t.storage is None else t.storage
        if base is not None:
            if t.storage is not None:
                raise self._source.error(
                    node, "storage=… on shared memory", "it where the memory is made"
                )
            there = size_of(base.untyped_storage().nbytes())
        least, most = self._hint(node, needed), self._hint(node, there)
        if least is not None and least > _LARGEST:
            raise self._source.error(node, f"a tensor of {least} bytes", "at most 2**63 - 1")
        if least is not None and most is not None and least > most:
            got = f"a tensor that needs {least} bytes of memory"
            raise self._source.error(node, got, f"no more than its {most}")

        def make() -> torch.Tensor:
            memory = self._fakes.memory(there) if base is None else base.untyped_storage()
            return self._fakes.tensor(
                t.dtype, t.sizes, t.strides, t.offset, memory, device=t.device, grad=t.grad
            )

        return self._made(node, make)

    def _made(self, node: ast.expr, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return make()
        except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self._source.error(
                node, self._source.quote(node), f"a tensor that PyTorch makes: {reason}"
            ) from error
