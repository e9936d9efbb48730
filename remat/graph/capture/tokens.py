"""Find the dimensions of a value that index tokens, and the way in which a call runs on only some tokens.

A language model's loss runs on values such as ``[batch, sequence, vocabulary]``. The adjacent dimensions of a
value that index the tokens, here ``[batch, sequence]``, are the value's *span*. A *slice* of the value holds only
some of its tokens. All tokens of a slice are in the last dimension of the span. The other dimensions of the span
have size 1 in a slice, so that a slice has as many dimensions as the value. For example, a slice of 64 tokens has
the shape ``[1, 64, vocabulary]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from remat.errors import PlanError
from remat.graph.memory.storages import SYMBOLIC, fake_mode_of

_aten = torch.ops.aten


def operators(names: str) -> tuple[Any, ...]:
    """Return the ``aten`` operators whose names a text lists; a name without an overload means the ``default`` one."""
    parts = (name.partition(".") for name in names.split())
    return tuple(
        getattr(getattr(_aten, name), overload or "default") for name, _, overload in parts
    )


#: Metadata key for the number of the chunk of tokens on which a node runs; -1 for a node that joins chunks.
CHUNK = "remat_chunk"
#: Products of two matrices; the last two arguments are the matrices.
PRODUCTS = operators("mm addmm")
#: Operators that return a value in another shape, with its elements in the same order.
VIEWS = operators("view reshape _unsafe_view")
_SUMS = operators("sum sum.dim_IntList")
#: Operators that work on each element alone, although PyTorch does not tag them as pointwise.
SAME = (
    torch.ops.prims.convert_element_type.default,
    *operators("_to_copy clone alias detach zeros_like expand"),
)
#: Operators that only permute or add dimensions.
_FREE = operators("permute t transpose.int unsqueeze")
#: For operators such as ``softmax`` that run along some dimensions, the position of the argument that names these
#: dimensions.
_ALONG = {
    **dict.fromkeys(
        operators(
            "_log_softmax _softmax gather scatter.src scatter.value scatter_add slice.Tensor squeeze.dim squeeze.dims "
            "amax amin argmax any.dim logsumexp sum sum.dim_IntList"
        ),
        1,
    ),
    **dict.fromkeys(
        operators("slice_scatter _log_softmax_backward_data _softmax_backward_data"), 2
    ),
}


class Span(NamedTuple):
    """Adjacent dimensions of a value that index its tokens, without dimensions of size 1 at either end.

    Attributes:
        start: first dimension of the span. Negative if the value lacks leading dimensions of the span and is
            broadcast along them.
        stop: the dimension after the last one of the span.
    """

    start: int
    stop: int

    def sliced(self, shape: Sequence[int], tokens: int) -> list[int]:
        """Return the shape of a slice with ``tokens`` tokens, for a value with the given shape."""
        ones = [1] * (self.stop - max(0, self.start) - 1)
        return [*shape[: max(0, self.start)], *ones, tokens, *shape[self.stop :]]

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the token dimensions in a shape; dimensions that the shape lacks are left out."""
        return tuple(shape[max(0, self.start) : max(0, self.stop)])

    def moved(self, by: int) -> Span:
        """Return the token dimensions of a value that has ``by`` more leading dimensions; ``by`` may be negative."""
        return Span(self.start + by, self.stop + by)


class Rule(NamedTuple):
    """How one call runs on slices of its arguments; a slice holds only some of the tokens.

    Attributes:
        span: the span of the result. None if the call sums over the tokens, so that the results for all slices
            must be added.
        reads: span of each argument that holds tokens.
        sizes: sizes of a span's dimensions, the same for all arguments. Only an argument that is broadcast may
            have size 1 instead, or lack leading dimensions.
    """

    span: Span | None
    reads: Mapping[fx.Node, Span]
    sizes: tuple[int, ...]

    def arguments(self, node: fx.Node, taken: Mapping[fx.Node, fx.Node], tokens: int) -> Any:
        """Return target, arguments and keyword arguments with which a call runs on slices of ``tokens`` tokens."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: taken.get(n, n))
        if self.span is None:
            return node.target, args, kwargs
        sizes = self.span.sliced(shape_of(node), tokens)
        if node.target in VIEWS:
            return _aten.view.default, (args[0], sizes), {}
        if node.target is _aten.expand.default:
            args = (args[0], sizes)
        elif node.target is _aten.full.default:
            args = (sizes, *args[1:])
        return node.target, args, kwargs


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor as ints.

    Raises:
        PlanError: a size is symbolic.
    """
    shape = node.meta["val"].shape
    sizes = [s.node.maybe_as_int() if isinstance(s, SYMBOLIC) else int(s) for s in shape]
    if None in sizes:
        raise PlanError(
            f"the loss cannot be split into chunks: the shape {tuple(shape)} of '{node.name}' is symbolic; expected a "
            "fixed number of tokens, as from torch.compile(model, dynamic=False)"
        )
    return tuple(sizes)


def is_tensor(value: Any) -> bool:
    """Return whether an argument of a call is a node with a tensor as result."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def rule_of(
    node: fx.Node, span_of: Mapping[fx.Node, Span], want: Span | None = None
) -> Rule | None:
    """Return the rule by which a call runs on slices of its arguments; None if it cannot run on slices.

    Args:
        node: the call.
        span_of: spans of the values that hold tokens, by the node that computes the value.
        want: span that the result must have; None if the spans of the arguments determine it.

    Raises:
        PlanError: a size is symbolic.
    """
    if node.op != "call_function" or not is_tensor(node):
        return None
    target, shape = node.target, shape_of(node)
    tags = getattr(target, "tags", ())
    if target in PRODUCTS:
        return _product(node, span_of, want)
    if target is _aten.full.default and want is not None:
        return Rule(want, {}, shape[want.start : want.stop])
    if target in SAME or (
        torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    ):
        return _pointwise(node, span_of, want)
    if target in VIEWS:
        return _view(node, span_of, want)
    if target in _ALONG or (target in _FREE and want is None):
        return _along(node, span_of, want)
    if want is None and target is _aten.nll_loss_backward.default:
        rows, arguments = Span(0, 1), node.all_input_nodes
        reads = {n: rows for n in arguments if shape_of(n)[:1] == shape[:1]}
        return Rule(rows, reads, shape[:1]) if rows in map(span_of.get, arguments) else None
    return None


def _pointwise(node: fx.Node, span_of: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    shape = shape_of(node)
    lacks = {n: len(shape) - len(shape_of(n)) for n in node.all_input_nodes if is_tensor(n)}
    spans = {span_of[n].moved(by) for n, by in lacks.items() if n in span_of} | ({want} - {None})
    if len(spans) != 1:
        return None
    (span,) = spans
    assert span is not None
    own = {n: span.moved(-by) for n, by in lacks.items()}
    # An argument of size 1 in all dimensions of the span is the same for all tokens.
    reads = {n: s for n, s in own.items() if math.prod(s.of(shape_of(n))) > 1}
    return Rule(span, reads, span.of(shape))


def _span_after_view(span: Span, shape: Sequence[int], new: Sequence[int]) -> Span | None:
    """Return a value's token dimensions after a view changes its shape; None if tokens mix with another dimension."""
    before, tokens = math.prod(shape[: span.start]), math.prod(shape[span.start : span.stop])
    start, size = 0, 1
    while start < len(new) and (size < before or new[start] == 1):
        size *= new[start]
        start += 1
    stop, count = start, 1
    while stop < len(new) and count < tokens:
        count *= new[stop]
        stop += 1
    return Span(start, stop) if (size, count) == (before, tokens) else None


def _view(node: fx.Node, span_of: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    base: Any = node.args[0]
    old, new = shape_of(base), shape_of(node)
    own = span_of.get(base) or (want and _span_after_view(want, new, old))
    span = own and _span_after_view(own, old, new)
    if own is None or span is None or want not in (None, span):
        return None
    return Rule(span, {base: own}, old[own.start : own.stop])


def _along(node: fx.Node, span_of: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    spans = {span_of[n] for n in operands if n in span_of} | (set() if want is None else {want})
    parts = {shape_of(n)[s.start : s.stop] for n in operands for s in spans}
    if len(spans) != 1 or len(parts) != 1:
        return None
    (own,), (sizes,) = spans, parts
    reads = dict.fromkeys(operands, own)
    inside: set[int] = set()  # dimensions of the span along which the call runs
    if node.target in _ALONG:
        rank, at = len(shape_of(operands[0])), _ALONG[node.target]
        named_dims: Any = node.args[at] if len(node.args) > at else None
        if named_dims is None or named_dims == []:
            named_dims = 0 if node.target is _aten.slice.Tensor else range(rank)
        dims = {d % rank for d in ([named_dims] if isinstance(named_dims, int) else named_dims)}
        inside = dims & set(range(own.start, own.stop))
    if not inside:
        span = _probe(node, reads, math.prod(sizes))
        return None if span is None else Rule(span, reads, sizes)
    sums = node.target in _SUMS and len(inside) == own.stop - own.start
    return Rule(None, reads, sizes) if sums else None


def _probe(node: fx.Node, reads: Mapping[fx.Node, Span], tokens: int) -> Span | None:
    """Return the token dimensions of a call's result: the adjacent dimensions that change with the number of tokens."""
    mode, shape = fake_mode_of(node.meta["val"]), shape_of(node)
    with mode, torch.no_grad():
        values = {
            # One token more than the value: all dimensions that hold tokens then change.
            n: n.meta["val"].new_empty(s.sliced(shape_of(n), tokens + 1))
            for n, s in reads.items()
        }
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: values[n] if n in values else n.meta["val"]
        )
        got = list(node.target(*args, **kwargs).shape)  # type: ignore[operator]
    changed = [d for d, (a, b) in enumerate(zip(got, shape, strict=True)) if a != b]
    span = Span(changed[0], changed[-1] + 1)
    return span if got == span.sliced(shape, tokens + 1) else None


def _product(node: fx.Node, span_of: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    matrices: Any = node.args[-2:]
    biases: Any = node.args[:-2]
    a, b = matrices
    if a is b:
        return None
    rows, columns = Span(0, 1), Span(1, 2)
    if span_of.get(a) == columns or span_of.get(b) == rows:
        reads: Any = {a: columns, b: rows}
        sizes = shape_of(a)[1:]
        span = None
    else:
        span = want or (rows if span_of.get(a) == rows else columns)
        reads = {a if span == rows else b: span}
        sizes = shape_of(node)[span.start : span.stop]
    if any(span_of.get(n, reads.get(n)) != reads.get(n) for n in matrices):
        return None
    for bias in biases:
        lacks = 2 - len(shape_of(bias))
        if span is None or math.prod(span.moved(-lacks).of(shape_of(bias))) > 1:
            return None
    return Rule(span, reads, sizes)
