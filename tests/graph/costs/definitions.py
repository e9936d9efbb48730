"""Layers computed from their definitions, product by product, which counts the products of forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

T = torch.Tensor
Index = tuple[int, ...]


class Products:
    """Sums of products of single elements, which are counted."""

    count = 0

    def sums(self, x: T, y: T, shape: Sequence[int], terms: Iterable[tuple[Index, ...]]) -> T:
        """Return a tensor of sums of products; its backward counts products too.

        Args:
            x: tensor of first factors.
            y: tensor of second factors.
            shape: sizes of the result.
            terms: for each product, the indices of the sum, of the first and of the second factor.
        """
        indices = zip(zip(*terms, strict=True), (shape, x.shape, y.shape), strict=True)
        result: T = _Sums.apply(x, y, shape, [_flat(i, s) for i, s in indices], self)
        return result

    def added(self, shape: Sequence[int], at: T, terms: T) -> T:
        self.count += len(terms)
        return terms.new_zeros(math.prod(shape)).index_add(0, at, terms).reshape(tuple(shape))


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, y: T, shape: Any, indices: list[T], products: Products) -> T:
        ctx.save_for_backward(x, y)
        ctx.indices, ctx.products = indices, products
        rows, xs, ys = indices
        return products.added(shape, rows, x.flatten()[xs] * y.flatten()[ys])

    @staticmethod
    def backward(ctx: Any, *grads: T) -> Any:
        (x, y), (rows, xs, ys) = ctx.saved_tensors, ctx.indices
        grad, added = grads[0].flatten()[rows], ctx.products.added
        for_x, for_y, *_ = ctx.needs_input_grad
        of_x = added(x.shape, xs, grad * y.flatten()[ys]) if for_x else None
        of_y = added(y.shape, ys, grad * x.flatten()[xs]) if for_y else None
        return of_x, of_y, None, None, None


def _flat(indices: Sequence[Index], shape: Sequence[int]) -> T:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.tensor([sum(map(int.__mul__, index, strides)) for index in indices])


def places(*sizes: int) -> list[Index]:
    """All index tuples of a tensor."""
    return list(itertools.product(*map(range, sizes)))


def matmul(products: Products, x: T, y: T) -> T:
    """Return the products of two stacks of matrices."""
    *batch, rows, inner = x.shape
    columns = y.shape[-1]
    terms = [
        ((*b, i, j), (*b, i, k), (*b, k, j))
        for b in places(*batch)
        for i, j, k in places(rows, columns, inner)
    ]
    return products.sums(x, y, (*batch, rows, columns), terms)


def bilinear(products: Products, x: T, weight: T, y: T) -> T:
    """Multiply the first input by the weight, then by the second input."""
    (rows, wide), (out, _, narrow) = x.shape, weight.shape
    terms = [((r, o, j), (r, i), (o, i, j)) for r, o, i, j in places(rows, out, wide, narrow)]
    first = products.sums(x, weight, (rows, out, narrow), terms)
    rest = [((r, o), (r, o, j), (r, j)) for r, o, j in places(rows, out, narrow)]
    return products.sums(first, y, (rows, out), rest)


def convolution(
    products: Products,
    x: T,
    weight: T,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> T:
    """Slide each filter over the channels of its group; the sizes of all dimensions step alike."""
    x = pad(x, [padding, padding] * (x.dim() - 2))
    filters, width, *window = weight.shape
    each = filters // groups
    spans = [
        (s - dilation * (k - 1) - 1) // stride + 1 for s, k in zip(x.shape[2:], window, strict=True)
    ]
    terms = [
        (
            (n, f, *at),
            (
                n,
                f // each * width + c,
                *(a * stride + k * dilation for a, k in zip(at, tap, strict=True)),
            ),
            (f, c, *tap),
        )
        for n, f, c in places(len(x), filters, width)
        for at in places(*spans)
        for tap in places(*window)
    ]
    return products.sums(x, weight, (len(x), filters, *spans), terms)


def transposed_convolution(
    products: Products,
    x: T,
    weight: T,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> T:
    """Add each element of the input, times a filter, to the result; padding is cut off."""
    inputs, width, *window = weight.shape
    each = inputs // groups
    spans = [
        (s - 1) * stride + dilation * (k - 1) + 1 for s, k in zip(x.shape[2:], window, strict=True)
    ]
    terms = [
        (
            (
                n,
                c // each * width + f,
                *(a * stride + k * dilation for a, k in zip(at, tap, strict=True)),
            ),
            (n, c, *at),
            (c, f, *tap),
        )
        for n, c, f in places(len(x), inputs, width)
        for at in places(*x.shape[2:])
        for tap in places(*window)
    ]
    whole = products.sums(x, weight, (len(x), width * groups, *spans), terms)
    return pad(whole, [-padding, -padding] * (x.dim() - 2))


def scores(products: Products, query: T, key: T) -> T:
    """Return the dot product of each query with each key; several heads of queries may share one of keys."""
    batch, heads, queries, width = query.shape
    shared = heads // key.shape[1]
    terms = [
        ((b, h, i, j), (b, h, i, k), (b, h // shared, j, k))
        for b, h, i, j, k in places(batch, heads, queries, key.shape[2], width)
    ]
    return products.sums(query, key, (batch, heads, queries, key.shape[2]), terms)


def attention(products: Products, query: T, key: T, value: T) -> T:
    """Average the values by the softmax of the scores."""
    weights = (scores(products, query, key) / math.sqrt(query.shape[-1])).softmax(-1)
    batch, heads, queries, keys = weights.shape
    shared, width = heads // value.shape[1], value.shape[-1]
    terms = [
        ((b, h, i, k), (b, h, i, j), (b, h // shared, j, k))
        for b, h, i, j, k in places(batch, heads, queries, keys, width)
    ]
    return products.sums(weights, value, (batch, heads, queries, width), terms)


def lstm(products: Products, x: T, h: T, c: T, of_x: T, of_h: T, of_out: T | None = None) -> T:
    """Run one layer over the time steps of ``x``, with a projection of the state if given."""
    rows = []
    for step in x:
        gates = matmul(products, step, of_x.T) + matmul(products, h, of_h.T)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        h = h if of_out is None else matmul(products, h, of_out.T)
        rows.append(h)
    return torch.stack(rows)


def gru(products: Products, x: T, h: T, of_x: T, of_h: T) -> T:
    """Run one layer over the time steps of ``x``."""
    rows = []
    for step in x:
        r, z, n = matmul(products, step, of_x.T).chunk(3, -1)
        hr, hz, hn = matmul(products, h, of_h.T).chunk(3, -1)
        z = (z + hz).sigmoid()
        h = (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * h
        rows.append(h)
    return torch.stack(rows)


def rnn_tanh(products: Products, x: T, h: T, of_x: T, of_h: T) -> T:
    """Run one layer over the time steps of ``x``."""
    return _rnn(products, torch.tanh, x, h, of_x, of_h)


def rnn_relu(products: Products, x: T, h: T, of_x: T, of_h: T) -> T:
    """Run one layer over the time steps of ``x``."""
    return _rnn(products, torch.relu, x, h, of_x, of_h)


def _rnn(products: Products, bend: Callable[[T], T], x: T, h: T, of_x: T, of_h: T) -> T:
    rows = []
    for step in x:
        h = bend(matmul(products, step, of_x.T) + matmul(products, h, of_h.T))
        rows.append(h)
    return torch.stack(rows)
