"""Write and read the values of nodes as types such as ``f32[8, 4](1, 8)``, with their storages.

Reading a type creates a fake value, such as a fake tensor, which has a storage of its own or shares
the storage of an earlier tensor. A type leaves out properties that follow from sizes and operator
schemas, such as the strides of a contiguous tensor.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError, first_line
from remat.graph.memory.storages import SYMBOLIC, storage_key
from remat.graph.memory.writes import aliased_argument
from remat.graph.text.literals import ArgumentReader, ArgumentWriter
from remat.graph.text.sizes import Expressions, Fakes, Size, size_of, write_expression
from remat.graph.text.syntax import Source, written_call
from remat.torch_compat import dtype_abbrs

_DTYPES = {name: dtype for dtype, name in dtype_abbrs.items()}
#: Largest number of elements of a constant that is written with its numbers. For a larger constant, only the type
#: is written.
MAX_CONSTANT = 64
_SYMBOLIC = tuple(kind.__name__ for kind in SYMBOLIC)


def base_of(node: fx.Node) -> Any:
    """Return the value whose storage a node's value uses if the text names no storage after ``@``.

    For ``split[1]``, return element 1 of the value of ``split``. For a view, return the value of the
    argument that the view shows. For any other node, return None: its value has a storage of its own.
    """
    if node.target is operator.getitem:
        if len(node.args) != 2:
            return None
        container, k = node.args
        value = container.meta.get("val") if isinstance(container, fx.Node) else None
        return element(value, k) if isinstance(value, (tuple, list)) and type(k) is int else None
    base = aliased_argument(node)
    return None if base is None else base.meta.get("val")


def element(base: Any, k: int) -> Any:
    """Return the value whose storage element ``k`` of a tuple uses by default, if the tuple is a view of ``base``."""
    if not isinstance(base, (tuple, list)):
        return base
    return base[k] if -len(base) <= k < len(base) else None


def contiguous(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Return the strides, in elements, of a contiguous tensor with the given sizes."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(sizes):
        strides.append(step)
        # As in PyTorch, a dimension of size 0 counts as 1 for strides.
        step = step * (max(size, 1) if type(size) is int else size)
    return tuple(reversed(strides))


def extent(sizes: Sequence[Size], strides: Sequence[Size], offset: Size, itemsize: int) -> Size:
    """Return the least size in bytes of a storage that can hold a tensor."""
    if any(type(s) is int and s == 0 for s in sizes):
        return 0
    # A plain product keeps symbolic sizes simpler than the sum below.
    if offset == 0 and tuple(strides) == contiguous(sizes):
        count: Size = itemsize
        for size in sizes:
            count = count * size
        return count
    last = offset
    for size, stride in zip(sizes, strides, strict=True):
        last = last + (size - 1) * stride
    return (last + 1) * itemsize


class ValueWriter:
    """Writes the values of one graph's nodes as types such as ``f32[8, 4]``, in graph order.

    Args:
        literals: writes constants, and collects the symbols in them and in sizes.
        device: default device, which the types leave out.
        graph: dotted name of the graph, such as ``"joint.true_graph_0"``.
    """

    def __init__(self, literals: ArgumentWriter, device: torch.device, graph: str) -> None:
        self._literals = literals
        self._device = device
        self._graph = graph
        self._places: dict[
            int, tuple[str, str]
        ] = {}  # by storage key: graph and name of the first tensor

    def nested(self, name: str) -> ValueWriter:
        """Return a writer for the subgraph ``name``, whose values may share storages with values of this graph."""
        inner = copy.copy(self)
        inner._graph = f"{self._graph}.{name}"
        return inner

    def write(self, node: fx.Node) -> str:
        """Return the text of a node's value, which is a type such as ``f32[8, 4](1, 8)``."""
        return self._write(node.meta["val"], node.name, base_of(node))

    def constant(self, tensor: torch.Tensor) -> str:
        """Return the text of a constant tensor: its type, and its numbers as nested lists.

        The numbers are left out if the tensor has more than `MAX_CONSTANT` elements or its numbers
        are unknown. The text does not state whether the tensor shares its storage with other
        tensors.
        """
        kind, real = self._tensor(tensor, owns=True), _real(tensor)
        if real is None:
            return kind
        # During a compilation, a fake mode would turn the result of `detach` into a fake tensor.
        with torch_compat.disable_current_modes():
            return f"{kind}, {self._literals.write(real.detach().tolist())}"

    def _write(self, value: Any, place: str, base: Any) -> str:
        """Return the text of a value, which is a type such as ``f32[8, 4](1, 8)``."""
        if isinstance(value, torch.Tensor):
            return self._placed(value, place, base)
        if isinstance(value, (tuple, list)):
            parts = [self._write(v, f"{place}[{k}]", element(base, k)) for k, v in enumerate(value)]
            if isinstance(value, list):
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if isinstance(value, torch_compat.BackwardState):
            return "backward_state"
        return self._literals.write(value)

    def _placed(self, tensor: torch.Tensor, place: str, base: Any) -> str:
        """Return the text of a tensor's type; a storage other than the default one follows after ``@``."""
        key = storage_key(tensor)
        if key is None:
            return self._tensor(tensor, owns=True)
        expected = storage_key(base)
        graph, owner = self._places.setdefault(key, (self._graph, place))
        if (graph, owner) == (self._graph, place):
            own = self._tensor(tensor, owns=True)
            return own if expected is None else f"{own} @ None"
        shared = self._tensor(tensor, owns=False)
        if key == expected:
            return shared
        return f"{shared} @ {owner if graph == self._graph else f'{graph}.{owner}'}"

    def _tensor(self, tensor: torch.Tensor, *, owns: bool) -> str:
        name = dtype_abbrs.get(tensor.dtype)
        wrapped = bool(torch_compat.is_traceable_wrapper_subclass(tensor))
        if name is None or wrapped or tensor.layout is not torch.strided:
            raise ProblemError(
                f"a {type(tensor).__name__} of {tensor.dtype} has no text form: expected a plain "
                "tensor, as AOTAutograd leaves them in joint graphs"
            )
        sizes = [size_of(s) for s in tensor.shape]
        text = f"{name}[{', '.join(map(self._size, sizes))}]" if sizes else name
        extra = self._memory(tensor, sizes, owns)
        if tensor.device != self._device:
            extra.append(f'device="{tensor.device}"')
        return written_call(text, extra) if extra else text

    def _memory(self, tensor: torch.Tensor, sizes: list[Size], owns: bool) -> list[str]:
        """Return the texts of strides, offset and storage size that do not follow from the sizes."""
        # Only what does not follow from the sizes is written.
        properties: list[str] = []
        strides = tuple(size_of(s) for s in tensor.stride())
        if strides != contiguous(sizes):
            properties += map(self._size, strides)
        offset = size_of(tensor.storage_offset())
        if offset != 0:
            properties.append(f"offset={self._size(offset)}")
        if owns:
            nbytes = size_of(tensor.untyped_storage().nbytes())
            expected = extent(sizes, strides, offset, tensor.element_size())
            # SymPy may hold the same size in two forms, which compare as unequal.
            if nbytes != expected and sympy.expand(nbytes - expected) != 0:
                properties.append(f"storage={self._size(nbytes)}")
        return properties

    def _size(self, size: Size) -> str:
        return write_expression(size, self._literals.symbols)


class ValueReader:
    """Creates the values of one graph's nodes from types such as ``f32[8, 4]``, in graph order.

    Args:
        source: the text, for error messages.
        fakes: creates fake tensors and symbolic numbers.
        device: default device, for types without a device.
        graph: dotted name of the graph, such as ``"joint.true_graph_0"``.
    """

    def __init__(self, source: Source, fakes: Fakes, device: torch.device, graph: str) -> None:
        self._source = source
        self._fakes = fakes
        self._expressions = Expressions(source, fakes.symbols)
        self._device = device
        self._graph = graph
        self._places: dict[str, torch.Tensor] = {}
        self._literals = ArgumentReader(source, symbolic=self.symbolic)

    def nested(self, name: str) -> ValueReader:
        """Return a reader for the subgraph ``name``, whose values may share storages with values of this graph."""
        inner = copy.copy(self)
        inner._graph = f"{self._graph}.{name}"
        return inner

    def read(self, node: fx.Node, written: ast.expr) -> Any:
        """Create a node's value from the type in the text, given the target and arguments of the node."""
        return self._read(written, f"{self._graph}.{node.name}", base_of(node))

    def constant(self, kind: ast.expr, numbers: ast.expr | None = None) -> torch.Tensor:
        """Return the tensor that ``constant(name, type, numbers)`` in the text describes.

        A tensor that is not a dense CPU tensor is fake, and its attribute ``constant`` has the numbers.

        Raises:
            ProblemError: the shape of the numbers is not that of the type.
        """
        fake = self._tensor(kind, None)
        if numbers is None:
            return fake
        listed = self._literals.read(numbers)
        try:
            flat = torch.tensor(listed, dtype=fake.dtype, device="cpu")
        except (OverflowError, RuntimeError, TypeError, ValueError):
            flat = None
        if flat is None or tuple(flat.shape) != tuple(fake.shape):
            expected = f"nested lists in the shape {tuple(fake.shape)}"
            raise self._source.error(numbers, expected, "these numbers")
        # `torch.tensor` has made a contiguous CPU tensor on a storage of its size. Other types differ from it.
        dense = fake.is_contiguous() and fake.untyped_storage().nbytes() == flat.nbytes
        if fake.device.type == "cpu" and dense:
            return flat
        fake.constant = flat  # type: ignore[attr-defined]
        return fake

    def symbolic(self, node: ast.Subscript) -> Any:
        """Return the symbolic number for ``SymInt[…]``, ``SymFloat[…]`` or ``SymBool[…]``."""
        if not isinstance(node.value, ast.Name) or node.value.id not in _SYMBOLIC:
            raise self._source.error(node, "SymInt[…], SymFloat[…], SymBool[…]")
        expression = self._expressions.read(node.slice)
        # SymPy's truth values are not `Expr`.
        if isinstance(expression, sympy.Expr) is (node.value.id == "SymBool"):
            raise self._source.error(node, "the type of what it computes")
        try:
            return self._fakes.number(node.value.id, expression)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._source.error(node, str(error), "{}, which has no value") from error

    def _read(self, node: ast.expr, place: str, base: Any) -> Any:
        """Create the value for a type in the text, such as ``f32[8, 4](1, 8)``."""
        match node:
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                items = [
                    self._read(x, f"{place}[{k}]", element(base, k)) for k, x in enumerate(elts)
                ]
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Name(id="backward_state"):
                return torch_compat.BackwardState()
            case ast.BinOp(op=ast.MatMult()):
                tensor = self._tensor(node.left, self._owner(node.right))
            case _ if _dtype_of(node) is None:
                return self._literals.read(node)
            case _:
                tensor = self._tensor(node, None if storage_key(base) is None else base)
        self._places[place] = tensor
        return tensor

    def _owner(self, node: ast.expr) -> torch.Tensor | None:
        """Return the tensor whose storage the text names after ``@``; None for a storage of its own."""
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        place = ast.unparse(node)
        # A name in this graph takes precedence over the full name of a value in another graph.
        owner = self._places.get(f"{self._graph}.{place}", self._places.get(place))
        if owner is None:
            expected = "that of a tensor above, such as mm or split[1]"
            raise self._source.error(node, expected, "the memory of {}")
        return owner

    def _details(self, call: ast.Call) -> dict[str | None, Any]:
        """Return a tensor's properties in parentheses after its sizes, by name."""
        details: dict[str | None, Any] = {}
        for keyword in call.keywords:
            if keyword.arg in ("offset", "storage"):
                details[keyword.arg] = self._size(keyword.value)
            elif keyword.arg == "device":
                details[keyword.arg] = self._literals.device(keyword.value)
            else:
                raise self._source.error(keyword, "offset, storage or device", f"'{keyword.arg}'")
        return details

    def _size(self, node: ast.expr) -> Size:
        size = self._expressions.size(node)
        number = self._hint(node, size)
        if number is not None and number < 0:
            raise self._source.error(node, "a number of 0 or more", f"the size {number}")
        return size

    def _hint(self, node: ast.expr, size: Size) -> int | None:
        try:
            return self._fakes.hint(size)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._source.error(node, f"one with a value ({error})", "the size {}") from error

    def _tensor(self, node: ast.expr, base: torch.Tensor | None) -> torch.Tensor:
        """Return the fake tensor that a type describes, on the storage of ``base``."""
        dtype = _dtype_of(node)
        if dtype is None:
            expected = "one such as f32[8, 4] or f32[8, 4](1, 8)"
            raise self._source.error(node, expected, "the type {}")
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        sizes: list[Size] = []
        if isinstance(call.func, ast.Subscript):
            listed = call.func.slice
            sizes = list(
                map(self._size, listed.elts if isinstance(listed, ast.Tuple) else [listed])
            )
        strides = tuple(map(self._size, call.args)) or contiguous(sizes)
        if len(strides) != len(sizes):
            expected = f"{len(sizes)}, one for each dimension"
            raise self._source.error(node, expected, f"{len(strides)} strides")
        details = self._details(call)
        offset = details.get("offset", 0)
        needed = extent(sizes, strides, offset, dtype.itemsize)
        available = details.get("storage", needed)
        if base is not None:
            if "storage" in details:
                expected = "it where the memory is made"
                raise self._source.error(node, expected, "storage=… on shared memory")
            available = size_of(base.untyped_storage().nbytes())
        least, most = self._hint(node, needed), self._hint(node, available)
        if least is not None and most is not None and least > most:
            got = f"a tensor that needs {least} bytes of memory"
            raise self._source.error(node, f"no more than its {most}", got)
        device, memory = details.get("device", self._device), available if base is None else base
        try:
            return self._fakes.tensor(dtype, (sizes, strides, offset), device, memory)
        except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            expected = f"a tensor that PyTorch makes: {first_line(error)}"
            raise self._source.error(node, expected) from error


def _dtype_of(node: ast.expr) -> torch.dtype | None:
    """Return the dtype in a tensor's type, such as ``f32[8, 4](1, 8)``; None for other expressions."""
    kind = node.func if isinstance(node, ast.Call) else node
    name = kind.value if isinstance(kind, ast.Subscript) else kind
    return _DTYPES.get(name.id) if isinstance(name, ast.Name) else None


def has_numbers(value: object) -> bool:
    """Return whether a constant's text states its numbers: it does if they are known, dense, and not too many."""
    return _real(value) is not None


def _real(value: object) -> torch.Tensor | None:
    """Return a real tensor with a constant's numbers; None if they are unknown or more than `MAX_CONSTANT`."""
    real = getattr(value, "constant", None) if hasattr(value, "fake_mode") else value
    if not isinstance(real, torch.Tensor) or real.layout is not torch.strided:
        return None
    if real.device.type == "meta" or real.is_quantized or real.numel() > MAX_CONSTANT:
        return None
    return real
