"""The token axis of values: which dimensions hold the tokens, and how calls run on some of the tokens.

A language model's loss runs on values such as ``[batch, sequence, vocabulary]``. Adjacent dimensions that
together hold every token are the value's *span*. A *slice* of such a value holds some of the tokens, in one
dimension in place of the span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from remat.errors import PlanError
from remat.graph.storages import SYMBOLIC

_aten, _prims = torch.ops.aten, torch.ops.prims

#: Products of two matrices; the last two arguments are the matrices.
PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_SAME = (
    _prims.convert_element_type.default,
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.zeros_like.default,
    _aten.expand.default,
)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_FLIPS = (_aten.permute.default, _aten.t.default, _aten.transpose.int)
_REDUCTIONS = (
    _aten.amax.default,
    _aten.amin.default,
    _aten.argmax.default,
    _aten.any.dim,
    _aten.logsumexp.default,
    _aten.mean.default,
    _aten.mean.dim,
    _aten.sum.default,
    _aten.sum.dim_IntList,
)
_SUMS = {
    _aten.sum.default: False,
    _aten.sum.dim_IntList: False,
    _aten.mean.default: True,
    _aten.mean.dim: True,
}
#: Position of the argument that names a dimension, for calls whose tensors share their leading dimensions.
_ALONG = {
    _aten._log_softmax.default: 1,
    _aten._log_softmax_backward_data.default: 2,
    _aten._softmax.default: 1,
    _aten._softmax_backward_data.default: 2,
    _aten.gather.default: 1,
    _aten.scatter.src: 1,
    _aten.scatter.value: 1,
    _aten.scatter_add.default: 1,
    _aten.slice.Tensor: 1,
    _aten.slice_scatter.default: 2,
    _aten.unsqueeze.default: 1,
    _aten.squeeze.dim: 1,
    _aten.squeeze.dims: 1,
}


class Span(NamedTuple):
    """Adjacent dimensions of a value that hold its tokens, without dimensions of size 1 at their ends."""

    start: int
    stop: int

    def sliced(self, shape: Sequence[int], tokens: int) -> list[int]:
        """Return the shape of a slice with so many tokens."""
        return [*shape[: self.start], tokens, *shape[self.stop :]]

    def dim(self, dim: int) -> int:
        """Return the dimension of a slice that is dimension ``dim`` of the value."""
        return min(dim, self.start) if dim < self.stop else dim - (self.stop - self.start) + 1

    def has(self, dim: int) -> bool:
        return self.start <= dim < self.stop

    def moved(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)


class Slices(Protocol):
    """Access to the slices of arguments while a call is built for some of the tokens."""

    tokens: int

    def take(self, node: fx.Node, span: Span, sizes: Sequence[int]) -> fx.Node:
        """Return the slice of an argument whose dimensions at ``span`` broadcast to ``sizes``."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call to the graph."""


class Rule(NamedTuple):
    """How one call runs on some of the tokens.

    Attributes:
        span: the span of the result; None if the call sums over the tokens, so that the results of all slices
            add up.
        reads: the arguments that hold tokens, with their spans.
        build: adds the call on a slice.
        mean: the number by which the sum of all slices is divided.
        product: whether the call multiplies matrices.
    """

    span: Span | None
    reads: Mapping[fx.Node, Span]
    build: Callable[[Slices], fx.Node]
    mean: int = 1
    product: bool = False


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        PlanError: a size is symbolic.
    """
    value = node.meta["val"]
    sizes = [
        s.node.maybe_as_int() if isinstance(s, SYMBOLIC) else int(s) for s in value.shape
    ]
    if None in sizes:
        raise PlanError(
            f"the size {tuple(value.shape)} of '{node.name}' is symbolic; expected a fixed number of tokens, for "
            "example torch.compile(model, dynamic=False)"
        )
    return tuple(sizes)  # type: ignore[arg-type]


def is_tensor(value: Any) -> bool:
    """Return whether a value is a node whose value is a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of a call's result depends on single elements of its arguments."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return node.target in _SAME or torch.Tag.pointwise in tags


def rule_of(node: fx.Node, known: Mapping[fx.Node, Span], want: Span | None = None) -> Rule | None:
    """Return the rule of a call; None if the call cannot run on slices.

    Args:
        node: the call.
        known: the spans of values that hold tokens.
        want: the span that the result must have, if no argument's span is known.
    """
    if node.op != "call_function" or not is_tensor(node):
        return None
    target = node.target
    if target in PRODUCTS:
        return _product(node, known, want)
    if is_pointwise(node):
        return _pointwise(node, known, want)
    if target in _VIEWS:
        return _view(node, known, want)
    if target is _aten.full.default and want is not None:
        return Rule(want, {}, lambda s: s.call(
            target, want.sliced(shape_of(node), s.tokens), *node.args[1:], **node.kwargs
        ))
    if want is not None:
        return None
    if target in _FLIPS:
        return _flip(node, known)
    if target in _REDUCTIONS:
        return _reduction(node, known)
    if target in _ALONG:
        return _along(node, known)
    if target is _aten.nll_loss_backward.default:
        return _nll_backward(node, known)
    return None


def spans_in(sizes: Sequence[int], span: Span, offset: int, wanted: Sequence[int]) -> Span | None:
    """Return the dimensions of a broadcast argument at the span of a result; None if it has no tokens there.

    Args:
        sizes: shape of the argument.
        span: the span of the result.
        offset: number of dimensions that the result has more than the argument.
        wanted: sizes of the result at the span.
    """
    own = span.moved(-offset)
    there = sizes[max(0, own.start) : max(0, own.stop)]
    return own if any(n != 1 for n in there) else None


def _pointwise(node: fx.Node, known: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    shape = shape_of(node)
    operands = {n: len(shape) - len(shape_of(n)) for n in node.all_input_nodes if is_tensor(n)}
    found = {known[n].moved(by) for n, by in operands.items() if n in known}
    if want is not None:
        found.add(want)
    if len(found) != 1:
        return None
    span = found.pop()
    sizes = shape[span.start : span.stop]
    reads = {}
    for n, by in operands.items():
        own = spans_in(shape_of(n), span, by, sizes)
        if own is not None:
            reads[n] = own

    def build(s: Slices) -> fx.Node:
        taken = {n: s.take(n, span.moved(-by), sizes) for n, by in operands.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: taken.get(n, n))
        if node.target is _aten.expand.default:
            args = (args[0], span.sliced(shape, s.tokens))
        return s.call(node.target, *args, **kwargs)

    return Rule(span, reads, build)


def _reshaped(span: Span, shape: Sequence[int], new: Sequence[int]) -> Span | None:
    """Return the span after a view from ``shape`` to ``new``; None if tokens share a dimension with others."""
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


def _view(node: fx.Node, known: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    base = node.args[0]
    assert isinstance(base, fx.Node)
    old, new = shape_of(base), shape_of(node)
    own = known.get(base) or (want and _reshaped(want, new, old))
    span = own and _reshaped(own, old, new)
    if own is None or span is None or want not in (None, span):
        return None

    def build(s: Slices) -> fx.Node:
        taken = s.take(base, own, old[own.start : own.stop])
        sizes = span.sliced(new, s.tokens)
        return taken if sizes == list(shape_of(taken)) else s.call(_aten.view.default, taken, sizes)

    return Rule(span, {base: own}, build)


def _flip(node: fx.Node, known: Mapping[fx.Node, Span]) -> Rule | None:
    base: Any = node.args[0]
    shape, own = shape_of(base), known[base]
    order = list(range(len(shape)))
    if node.target is _aten.permute.default:
        order = [d % len(shape) for d in node.args[1]]  # type: ignore[union-attr]
    else:
        a, b = node.args[1:] if len(node.args) > 1 else (0, -1)  # type: ignore[misc]
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    start = order.index(own.start)
    span = Span(start, start + own.stop - own.start)
    if order[start : span.stop] != list(range(own.start, own.stop)):
        return None
    kept = [own.dim(d) for d in order if not own.start < d < own.stop]
    return Rule(
        span,
        {base: own},
        lambda s: s.call(
            _aten.permute.default, s.take(base, own, shape[own.start : own.stop]), kept
        ),
    )


def _dims(given: Any, rank: int) -> list[int]:
    dims = given if isinstance(given, (list, tuple)) else [given]
    return [d % max(1, rank) for d in dims]


def _reduction(node: fx.Node, known: Mapping[fx.Node, Span]) -> Rule | None:
    base: Any = node.args[0]
    shape, own = shape_of(base), known[base]
    given = node.args[1] if len(node.args) > 1 else None
    rank = len(shape)
    dims = _dims(given, rank) if given not in (None, [], ()) else list(range(rank))
    inside = [d for d in dims if own.has(d)]
    sums = node.target in _SUMS
    over = len(inside) == own.stop - own.start
    if inside and not (over and sums):
        return None
    keeps = len(node.args) > 2 and bool(node.args[2])
    listed = node.target not in (_aten.argmax.default,)
    mapped: Any = sorted({own.dim(d) if not own.has(d) else own.start for d in dims})
    if not listed or (given is not None and not isinstance(given, (list, tuple))):
        if given is None:
            return None
        (mapped,) = mapped
    target = _aten.sum.dim_IntList if over else node.target
    gone = 0 if keeps else sum(d < own.start for d in dims)

    def build(s: Slices) -> fx.Node:
        taken = s.take(base, own, shape[own.start : own.stop])
        made = s.call(target, taken, mapped, keeps, *node.args[3:], **node.kwargs)
        # With `keepdim`, one dimension of size 1 stands for the span.
        sizes = list(shape_of(node))
        return s.call(_aten.view.default, made, sizes) if over and len(sizes) != len(shape_of(made)) else made

    if not over and node.target in (_aten.sum.default, _aten.mean.default):
        return None
    mean = math.prod(shape[d] for d in dims) if over and _SUMS.get(node.target) else 1
    return Rule(None if over else own.moved(-gone), {base: own}, build, mean)


def _along(node: fx.Node, known: Mapping[fx.Node, Span]) -> Rule | None:
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    found = {known[n] for n in operands if n in known}
    if len(found) != 1:
        return None
    own = found.pop()
    at = _ALONG[node.target]
    shapes = {n: shape_of(n) for n in operands}
    sizes = next(shapes[n] for n in operands if n in known)[own.start : own.stop]
    rank = len(next(iter(shapes.values()))) + (node.target is _aten.unsqueeze.default)
    given = node.args[at] if len(node.args) > at else 0
    dims = _dims(given, rank)
    span = own
    if node.target is _aten.unsqueeze.default:
        if own.start < dims[0] < own.stop:
            return None
        span = own.moved(dims[0] <= own.start)
        mapped: Any = dims[0] if dims[0] <= own.start else own.dim(dims[0] - 1) + 1
    else:
        if any(own.has(d) for d in dims) or any(
            shapes[n][own.start : own.stop] != sizes for n in operands
        ):
            return None
        mapped = [own.dim(d) for d in dims]
        if node.target in (_aten.squeeze.dim, _aten.squeeze.dims):
            first = next(iter(shapes.values()))
            span = own.moved(-sum(d < own.start and first[d] == 1 for d in dims))
        mapped = mapped if isinstance(given, (list, tuple)) else mapped[0]

    def build(s: Slices) -> fx.Node:
        taken = {n: s.take(n, own, sizes) for n in operands}
        args = list(fx.map_arg(node.args, lambda n: taken.get(n, n)))
        if len(args) > at:
            args[at] = mapped
        return s.call(node.target, *args, **node.kwargs)

    return Rule(span, dict.fromkeys(operands, own), build)


def _product(node: fx.Node, known: Mapping[fx.Node, Span], want: Span | None) -> Rule | None:
    *added, a, b = node.args
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    rows, columns = Span(0, 1), Span(1, 2)
    contracts = known.get(a) == columns or known.get(b) == rows
    reads = {a: columns, b: rows}
    span: Span | None = None
    if not contracts:
        span = want or (rows if known.get(a) == rows else columns)
        reads = {a: rows} if span == rows else {b: columns}
    if any(known.get(n, span) != span for n, span in reads.items()):
        return None
    if (contracts and added) or any(n in known for n in (a, b) if n not in reads):
        return None
    bias = added[0] if added else None
    sizes = shape_of(node)
    if isinstance(bias, fx.Node) and span is not None:
        off = 2 - len(shape_of(bias))
        if spans_in(shape_of(bias), span, off, sizes[span.start : span.stop]) is not None:
            return None

    def build(s: Slices) -> fx.Node:
        taken = [
            s.take(n, reads[n], [shape_of(n)[reads[n].start]]) if n in reads else n for n in (a, b)
        ]
        return s.call(node.target, *added, *taken, **node.kwargs)

    return Rule(span, reads, build, product=True)


def _nll_backward(node: fx.Node, known: Mapping[fx.Node, Span]) -> Rule | None:
    gradient, base, target, *others = node.args
    span = Span(0, 1)
    if known.get(base) != span or len(shape_of(base)) != 2:  # type: ignore[arg-type]
        return None
    assert isinstance(gradient, fx.Node)
    tokens = shape_of(node)[:1]
    reads: dict[Any, Span] = {base: span, target: span}
    if shape_of(gradient) == tokens:
        reads[gradient] = span

    def build(s: Slices) -> fx.Node:
        args = (
            s.take(n, span, tokens) if n in reads else n for n in (gradient, base, target)
        )
        return s.call(node.target, *args, *others, **node.kwargs)

    return Rule(span, reads, build)
