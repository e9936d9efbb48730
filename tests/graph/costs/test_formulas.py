"""FLOP formulas against counts of single products, which also compute what PyTorch's operators return."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.graph import ops
from remat.graph.costs.counting import count_flops
from remat.graph.costs.formulas import FORMULAS
from tests.graph.costs import definitions
from tests.graph.costs.definitions import Products
from tests.graph.costs.pricing import call_of
from tests.graphs import weight

T = torch.Tensor
aten = torch.ops.aten

#: Batch, channels, sizes; filters; window; then stride, padding, dilation and groups.
GEOMETRIES: dict[str, tuple[Sequence[int], int, Sequence[int], Sequence[int]]] = {
    "1d": ((2, 3, 7), 4, (3,), (1, 0, 1, 1)),
    "2d": ((2, 3, 5, 4), 4, (3, 2), (1, 0, 1, 1)),
    "3d": ((1, 2, 4, 3, 4), 3, (2, 3, 2), (1, 0, 1, 1)),
    "strided": ((2, 3, 7, 6), 2, (3, 2), (2, 0, 1, 1)),
    "padded": ((2, 3, 4, 4), 2, (3, 3), (1, 1, 1, 1)),
    "dilated": ((1, 3, 7, 7), 2, (3, 2), (1, 0, 2, 1)),
    "grouped": ((2, 6, 5, 5), 4, (3, 3), (2, 1, 1, 2)),
    "grouped 1d": ((2, 6, 7), 9, (3,), (1, 2, 2, 3)),
    "grouped 3d": ((1, 4, 3, 4, 3), 2, (2, 2, 2), (1, 1, 1, 2)),
    "depthwise": ((2, 5, 5, 5), 5, (3, 3), (1, 1, 1, 5)),
    "depthwise 3d": ((1, 2, 3, 4, 3), 2, (2, 2, 2), (1, 0, 1, 2)),
    "depthwise, two filters a channel": ((1, 3, 6, 6), 6, (3, 3), (2, 1, 1, 3)),
    "pointwise": ((2, 6, 3, 3), 4, (1, 1), (1, 0, 1, 1)),
}


def flops(target: Any, *args: Any, result: Any) -> int:
    """What one call is counted as; it does not run."""
    return count_flops(call_of(target, *args, result=result))


def backward(out: T, products: Products, *inputs: T) -> tuple[list[T], int]:
    """Gradients of half the sum of squares of a tensor, and the operations they take."""
    before = products.count
    grads = torch.autograd.grad(out, inputs, out.detach(), retain_graph=True)
    return list(grads), 2 * (products.count - before)


@functools.cache
def convolved(name: str, transposed: bool) -> SimpleNamespace:
    """A convolution by its definition: tensors, options, and operations."""
    shape, filters, window, (stride, padding, dilation, groups) = GEOMETRIES[name]
    channels = (shape[1], filters // groups) if transposed else (filters, shape[1] // groups)
    x, w, products = weight(*shape), weight(*channels, *window), Products()
    define = definitions.transposed_convolution if transposed else definitions.convolution

    def run(x: T, w: T) -> T:
        return define(products, x, w, stride, padding, dilation, groups)

    out = run(x, w)
    forward = 2 * products.count
    spatial = len(window)
    options = [[stride] * spatial, [padding] * spatial, [dilation] * spatial, transposed]
    return SimpleNamespace(
        x=x, w=w, out=out, products=products, run=run, forward=forward, transposed=transposed,
        options=(*options, [0] * spatial, groups), output_padding=[0] * spatial, window=list(window),
        stride=options[0], padding=options[1], dilation=options[2], groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions(name: str, transposed: bool) -> None:
    c = convolved(name, transposed)
    args = (c.x, c.w, None, *c.options)
    torch.testing.assert_close(aten.convolution.default(*args), c.out, atol=1e-4, rtol=1e-4)
    assert flops(aten.convolution.default, *args, result=c.out) == c.forward

    wanted, _ = backward(c.out, c.products, c.x, c.w)
    for mask in itertools.product([False, True], repeat=3):
        inputs = [
            t.detach().requires_grad_(wants) for t, wants in zip((c.x, c.w), mask, strict=False)
        ]
        differentiated = [t for t in inputs if t.requires_grad]
        out = c.run(*inputs)
        operations = backward(out, c.products, *differentiated)[1] if differentiated else 0
        args = (c.out.detach(), c.x, c.w, [c.out.shape[1]], *c.options, list(mask))
        grads = aten.convolution_backward.default(*args)
        for got, want, wants in zip(grads, wanted, mask, strict=False):
            if wants:
                torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
        assert flops(aten.convolution_backward.default, *args, result=grads) == operations, mask


def counted(define: Callable[..., T], *args: Any) -> tuple[T, int]:
    """A layer by its definition, and the operations that it takes."""
    products = Products()
    out = define(products, *args)
    return out, 2 * products.count


#: A call of an operator: its arguments, its result, and the operations by the definition.
Call = tuple[tuple[Any, ...], T, int]


def matrices() -> dict[str, Call]:
    x, y, row, column = weight(3, 4, 5), weight(3, 5, 6), weight(1, 5), weight(5, 1)
    stack, of_stack = counted(definitions.matmul, x, y)
    out, of_out = counted(definitions.matmul, x[0], y[0])
    vector, of_vector = counted(definitions.matmul, x[0], column)
    number, of_number = counted(definitions.matmul, row, column)
    outer, of_outer = counted(definitions.matmul, column, row)
    first, w, second = weight(3, 4), weight(2, 4, 5), weight(3, 5)
    form, of_form = counted(definitions.bilinear, first, w, second)
    zeros = torch.zeros(())
    product, batched = ((x[0], y[0]), out, of_out), ((x, y), stack, of_stack)
    return {
        **dict.fromkeys(("mm", "matmul", "_int_mm"), product),
        **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), batched),
        **dict.fromkeys(
            ("_scaled_mm", "_scaled_mm_v2"), ((*product[0], zeros, zeros), *product[1:])
        ),
        "bmm": batched,
        "linear": ((x[0], y[0].T, None), out, of_out),
        "addmm": ((zeros, x[0], y[0]), out, of_out),
        "_addmm_activation": ((zeros, x[0], y[0]), out.relu(), of_out),
        "baddbmm": ((zeros, x, y), stack, of_stack),
        "addbmm": ((zeros, x, y), stack.sum(0), of_stack),
        "mv": ((x[0], column[:, 0]), vector[:, 0], of_vector),
        "addmv": ((zeros, x[0], column[:, 0]), vector[:, 0], of_vector),
        **dict.fromkeys(("dot", "vdot"), ((row[0], column[:, 0]), number[0, 0], of_number)),
        "addr": ((zeros, column[:, 0], row[0]), outer, of_outer),
        "_trilinear": ((first, w, second, [1, 3], [0], [1, 2], [2, 3]), form, of_form),
    }


def convolutions() -> dict[str, Call]:
    """Kernels of convolutions, each with its own order of options."""

    def call(c: SimpleNamespace, options: str) -> Call:
        flags = {"bias": None, "off": False}
        given = [flags[n] if n in flags else getattr(c, n) for n in options.split()]
        return (c.x, c.w, *given), c.out, c.forward

    grouped, spread = convolved("grouped", False), convolved("grouped", True)
    plain, padded = convolved("strided", False), convolved("padded", True)
    deep, deep_spread = convolved("3d", False), convolved("3d", True)
    channels, line = convolved("depthwise", False), convolved("1d", False)
    whole = "bias stride padding dilation transposed output_padding groups"
    kernel, miopen = "window bias stride padding", "bias padding stride dilation groups"
    spreading = "padding output_padding stride dilation groups off off off"
    _, twice = backward(grouped.out, grouped.products, grouped.x, grouped.w)
    grad, mask = grouped.out.detach(), [True, True, False]
    time_first = (line.x.permute(2, 0, 1).contiguous(), line.w.permute(2, 1, 0), torch.zeros(4), 0)
    return {
        "convolution": call(grouped, whole),
        "convolution_overrideable": call(spread, whole),
        "_convolution": call(spread, f"{whole} off off off off"),
        # Flags of cuDNN stand where other operators say whether they are transposed.
        "cudnn_convolution": (
            (grouped.x, grouped.w, grouped.padding, grouped.stride, grouped.dilation, 2, *[True] * 3),
            grouped.out,
            grouped.forward,
        ),
        "mkldnn_convolution": call(grouped, miopen),
        "miopen_convolution": call(grouped, f"{miopen} off off"),
        "miopen_depthwise_convolution": call(channels, f"{miopen} off off"),
        "cudnn_convolution_transpose": call(spread, spreading),
        "miopen_convolution_transpose": call(spread, f"bias {spreading}"),
        "_slow_conv2d_forward": call(plain, kernel),
        "slow_conv3d_forward": call(deep, kernel),
        "slow_conv_dilated2d": call(convolved("dilated", False), f"{kernel} dilation"),
        "slow_conv_dilated3d": call(deep, f"{kernel} dilation"),
        "slow_conv_transpose2d": call(padded, f"{kernel} output_padding dilation"),
        "slow_conv_transpose3d": call(deep_spread, f"{kernel} output_padding dilation"),
        "_conv_depthwise2d": call(channels, f"{kernel} dilation"),
        "conv_depthwise3d": call(convolved("depthwise 3d", False), f"{kernel} dilation"),
        "conv_tbc": (time_first, line.out.permute(2, 0, 1), line.forward),
        "convolution_backward": (
            (grad, grouped.x, grouped.w, None, *grouped.options, mask), grad, twice
        ),
        "convolution_backward_overrideable": (
            (grad, grouped.x, grouped.w, *grouped.options, mask), grad, twice
        ),
    }  # fmt: skip


def attentions() -> dict[str, Call]:
    """Attention in which four heads of queries share two of keys and values."""
    q, k, v, products = weight(2, 4, 5, 3), weight(2, 2, 6, 3), weight(2, 2, 6, 3), Products()
    out = definitions.attention(products, q, k, v)
    operations = 2 * products.count
    _, of_backward = backward(out, products, q, k, v)
    of_backward += counted(definitions.scores, q, k)[1]  # computed again
    lse = (definitions.scores(products, q, k) / 3**0.5).logsumexp(-1)
    tokens_first = tuple(x.transpose(1, 2) for x in (q, k, v))
    grad, first_grad = out.detach(), out.transpose(1, 2)
    forward, back = ((q, k, v), out, operations), ((grad, q, k, v), grad, of_backward)
    names = ("efficient_attention", "flash_attention", "cudnn_attention")
    names += ("fused_attention_overrideable", "flash_attention_for_cpu")
    lengths, ends = (None, None, 5, 6), (first_grad, None)
    jagged = (None, None, None, None)
    return {
        **{f"_scaled_dot_product_{name}": forward for name in (*names, "attention_math")},
        **{f"_scaled_dot_product_{name}_backward": back for name in names},
        "_scaled_dot_product_flash_attention_for_cpu_backward": (
            (grad, q, k, v, out, lse, 0.0, False), q, of_backward
        ),
        "_flash_attention_forward": ((*tokens_first, *lengths, 0.0), out, operations),
        "_efficient_attention_forward": ((*tokens_first, None, *jagged, 0.0), out, operations),
        "_flash_attention_backward": (
            (first_grad, *tokens_first, *ends, *lengths, 0.0), q, of_backward
        ),
        "_efficient_attention_backward": (
            (first_grad, *tokens_first, None, first_grad, *lengths, None), q, of_backward
        ),
    }  # fmt: skip


def cudnn_backward(x: T, weights: Sequence[T], of_weights: bool) -> tuple[Any, ...]:
    """Arguments of cuDNN's backward of recurrent layers; ``None`` stands for tensors that no formula reads."""
    sizes, flags = (2, 4, 0, 1), (False, 0.0, True, False)
    mask = [True, True, True, of_weights]
    return (x, list(weights), 4, *[None] * 7, *sizes, *flags, [], None, None, mask)


def recurrences() -> dict[str, Call]:
    """Layers of 4 hidden numbers that read 5 steps of 2 sequences of 3 numbers, and cells of one step."""
    x, h, c = weight(5, 2, 3), weight(2, 4), weight(2, 4)
    calls: dict[str, Call] = {}
    layers = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
    for name, gates in layers.items():
        matrices, bias = (weight(gates * 4, 3), weight(gates * 4, 4)), torch.zeros(gates * 4)
        params, states = [*matrices, bias, bias], (h, c) if name == "lstm" else (h,)
        define = getattr(definitions, name)
        out, operations = counted(define, x, *states, *matrices)
        hx = [s[None] for s in states] if name == "lstm" else h[None]
        calls[name] = (x, hx, params, True, 1, 0.0, False, False, False), out, operations
        cell, of_cell = counted(define, x[:1], *states, *matrices)
        hx = list(states) if name == "lstm" else h
        calls[f"{name}_cell"] = (x[0], hx, *params), cell[0], of_cell
        if name == "lstm":
            products = Products()
            out = define(products, x, h, c, *matrices)
            _, twice = backward(out, products, x, h, c, *matrices)
            flags = (False, [], 2, 4, 1, True, False, False, False)
            calls["mkldnn_rnn_layer"] = (x, *params, h, c, *flags), out, operations
            calls["mkldnn_rnn_layer_backward"] = (x, *params), out, twice
            for kernel in ("_cudnn_rnn", "miopen_rnn"):
                calls[kernel] = (x, params, 4, None, h[None], c[None]), out, operations
                calls[f"{kernel}_backward"] = cudnn_backward(x, params, True), out, twice
    return calls


@functools.cache
def calls() -> dict[str, Call]:
    return {**matrices(), **convolutions(), **attentions(), **recurrences()}


#: Operators that a CPU runs in float32: their results are those of the definitions.
ON_A_CPU = [
    "mm",
    "matmul",
    "bmm",
    "linear",
    "addmm",
    "_addmm_activation",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "dot",
    "vdot",
    "addr",
    "_trilinear",
    "convolution",
    "_convolution",
    "mkldnn_convolution",
    "_slow_conv2d_forward",
    "slow_conv3d_forward",
    "slow_conv_dilated2d",
    "slow_conv_dilated3d",
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
    "conv_tbc",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "mkldnn_rnn_layer",
]


@pytest.mark.parametrize("name", [n.removeprefix("aten.") for n in FORMULAS])
def test_every_formula_counts_the_products_of_the_definition(name: str) -> None:
    args, out, operations = calls()[name]
    operator = getattr(aten, name)
    assert flops(operator, *args, result=out) == operations
    if name in ON_A_CPU:
        more = {"enable_gqa": True} if name.endswith("math") else {}
        result = operator(*args, **more)
        result = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(result, out, atol=1e-4, rtol=1e-4)


def test_a_recurrent_backward_without_gradients_of_weights() -> None:
    x, h, c, products = weight(5, 2, 3), weight(2, 4), weight(2, 4), Products()
    matrices = [torch.randn(16, 3), torch.randn(16, 4)]
    out = definitions.lstm(products, x, h, c, *matrices)
    _, operations = backward(out, products, x, h, c)
    args = cudnn_backward(x, [*matrices, *torch.zeros(2, 16)], False)
    assert flops(aten._cudnn_rnn_backward.default, *args, result=out) == operations


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_a_projected_state() -> None:
    x, h, c, out = weight(5, 2, 3), weight(2, 2), weight(2, 4), weight(2, 4)
    matrices = [weight(16, 3), weight(16, 2), out]
    rows, operations = counted(definitions.lstm, x, h, c, *matrices)
    params = [*matrices[:2], torch.zeros(16), torch.zeros(16), out]
    args = (x, [h[None], c[None]], params, True, 1, 0.0, False, False, False)
    torch.testing.assert_close(aten.lstm(*args)[0], rows)
    assert flops(aten.lstm.input, *args, result=rows) == operations


def test_packed_sequences() -> None:
    """Rows of all sequences stand one behind the other, in the order of time steps."""
    x, h, matrices = weight(5, 2, 3), weight(2, 4), (weight(12, 3), weight(12, 4))
    rows, operations = counted(definitions.gru, x, h, *matrices)
    params, sizes = [*matrices, *torch.zeros(2, 12)], torch.full((5,), 2)
    args = (x.reshape(10, 3), sizes, h[None], params, True, 1, 0.0, False, False)
    torch.testing.assert_close(aten.gru(*args)[0], rows.reshape(10, 4))
    assert flops(aten.gru.data, *args, result=rows) == operations


@pytest.mark.parametrize("operator", ["_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"])
def test_fused_cells_only_read_gates(operator: str) -> None:
    gates = torch.ones(2, 4 * (4 if "lstm" in operator else 3))
    target = getattr(aten, operator).default
    assert flops(target, gates, gates, torch.ones(2, 4), result=torch.ones(2, 4)) == 0


@pytest.mark.parametrize("operator", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_in_another_type(operator: str) -> None:
    """PyTorch's formulas refuse the argument ``out_dtype``."""
    args, out, operations = calls()[operator]
    target = getattr(aten, operator).dtype
    assert flops(target, *args, torch.float32, result=out) == operations


def test_four_bit_numbers_stand_two_in_an_element() -> None:
    x, y, scale = torch.ones(4, 16), torch.ones(16, 8), torch.ones(())
    _, operations = counted(definitions.matmul, x, y)
    packed = [torch.empty(s, dtype=torch.float4_e2m1fn_x2, device="meta") for s in ((4, 8), (8, 8))]
    result = torch.empty(4, 8)
    assert flops(aten._scaled_mm.default, *packed, scale, scale, result=result) == operations


def test_flash_attention_on_sequences_one_behind_the_other() -> None:
    """Two sequences of equal lengths; each query counts as many keys as the longest has."""
    q, k, v = torch.ones(2, 4, 5, 3), torch.ones(2, 4, 6, 3), torch.ones(2, 4, 6, 3)
    out, operations = counted(definitions.attention, q, k, v)
    rows = (x.transpose(1, 2).reshape(-1, 4, 3) for x in (q, k, v))
    ends = (torch.tensor([0, 5, 10]), torch.tensor([0, 6, 12]))
    args = (*rows, *ends, 5, 6, 0.0, False, False)
    assert flops(aten._flash_attention_forward.default, *args, result=out) == operations


def step_of_symbols(x: T, w: T, f: T, *of_layer: T) -> tuple[T, ...]:
    y = aten.convolution(x, f, None, [1], [1], [1], False, [0], 2)
    grads = aten.convolution_backward(
        y, x, f, None, [1], [1], [1], False, [0], 2, [True, True, False]
    )
    flags = (False, [], 2, 4, 1, True, False, False, False)
    rows = aten.mkldnn_rnn_layer(w, *of_layer, *flags)[0]
    return y, grads[0], rows


def test_symbolic_sizes() -> None:
    """Batch, channels, length of a sequence and hidden sizes are symbols."""
    bias, state = torch.zeros(16), torch.zeros(2, 4)
    layer = (torch.ones(16, 3), torch.ones(16, 4), bias, bias, state, state)
    args = (torch.ones(2, 4, 7), torch.ones(5, 2, 3), torch.ones(6, 2, 3), *layer)
    symbolic, static = (
        {ops.packet(n.target): count_flops(n) for n in traced.graph.nodes if count_flops(n)}
        for traced in (
            make_fx(step_of_symbols, tracing_mode=m)(*args) for m in ("symbolic", "fake")
        )
    )
    assert symbolic == static
    assert set(static) == {aten.convolution, aten.convolution_backward, aten.mkldnn_rnn_layer}


class Separable(torch.nn.Module):
    """A depthwise and a pointwise convolution, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.pointwise = torch.nn.Conv2d(8, 16, 1, bias=False)

    def forward(self, x: T) -> T:
        return self.pointwise(self.depthwise(x).relu())


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_backward_of_a_separable_convolution_costs_at_most_twice_its_forward(lower: str) -> None:
    """The input has no gradient, so the depthwise convolution's backward costs its forward once."""
    joint = remat.capture(Separable(), (torch.ones(2, 8, 6, 6),), lower=lower)
    found = [(n.target, count_flops(n)) for n in joint.graph.nodes]
    forward = [f for target, f in found if target is aten.convolution.default]
    back = [f for target, f in found if target is aten.convolution_backward.default]
    assert forward == [2 * 2 * 8 * 36 * 9, 2 * 2 * 16 * 36 * 8]
    assert back == [2 * forward[1], forward[0]]


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_an_lstm_on_a_cpu(lower: str) -> None:
    lstm = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        joint = remat.capture(lambda x: lstm(x)[0], (torch.ones(5, 2, 3),), lower=lower)
    weights = sum(w.numel() for w in lstm.parameters() if w.dim() == 2)
    found = [(ops.packet(n.target), count_flops(n)) for n in joint.graph.nodes]
    forward = sum(f for target, f in found if target is aten.mkldnn_rnn_layer)
    assert forward == 2 * 5 * 2 * weights
    assert sum(f for _, f in found) == 3 * forward
