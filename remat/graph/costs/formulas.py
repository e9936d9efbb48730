"""FLOP formulas of products, convolutions, attention and recurrent layers.

A multiplication and the addition of its result count as two operations. Additions alone, gates and
softmax count as no operation. Zeros of padding and masked scores count like other numbers, because
most kernels multiply them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Computes the operations of one call from the arguments, without keyword arguments, and the result. Tensors are
#: meta tensors, and symbolic sizes are ints.
Formula = Callable[[Sequence[Any], Any], int]

#: The formulas by operator name, such as ``"aten.mm"``. These formulas take precedence over PyTorch's. The keys are
#: names, not operators, because versions of PyTorch lack some of the operators.
FORMULAS: dict[str, Formula] = {}


def _formula(names: str) -> Callable[[Formula], Formula]:
    """Return a decorator that registers a FLOP formula for the aten operators that a text names."""

    def register(formula: Formula) -> Formula:
        FORMULAS.update({f"aten.{name}": formula for name in names.split()})
        return formula

    return register


# Matrices ---------------------------------------------------------------------------------------------


@_formula("mm bmm mv dot vdot linear matmul _int_mm _scaled_mm _scaled_mm_v2")
def _product(args: Sequence[Any], out: Tensor) -> int:
    """Count a matrix product: each element of the result sums over the last dimension of the first factor."""
    return 2 * out.numel() * _width(args[0])


@_formula("addmm baddbmm addmv _addmm_activation")
def _added_product(args: Sequence[Any], out: Tensor) -> int:
    return _product(args[1:], out)


@_formula("addbmm")
def _summed_products(args: Sequence[Any], out: Tensor) -> int:
    return len(args[1]) * _product(args[1:], out)


@_formula("addr")
def _added_outer_product(args: Sequence[Any], out: Tensor) -> int:
    return 2 * out.numel()


@_formula("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2")
def _grouped_product(args: Sequence[Any], out: Tensor) -> int:
    """Count the operations of a grouped matrix product, whose ragged dimension is split into groups."""
    x: Tensor = args[0]
    y: Tensor = args[1]
    # If one operand is a stack of matrices, the groups split rows of the first or columns of the second. If both
    # are matrices, the groups split the summed dimension. All groups together then take as many operations as one
    # product.
    rows = x.shape[-2] if x.dim() < y.dim() or y.dim() == 2 else x.shape[0] * x.shape[-2]
    return 2 * rows * _width(x) * y.shape[-1]


def _width(x: Tensor) -> int:
    """Return how many numbers a row of a tensor holds; a tensor of 4-bit floats packs two numbers into each element."""
    return x.shape[-1] * (2 if x.dtype is torch.float4_e2m1fn_x2 else 1)


@_formula("_trilinear")
def _trilinear_form(args: Sequence[Any], out: Tensor) -> int:
    """Count two products: the first factor times the second, then this product, partly summed, times the third."""
    expanded, summed = args[3:6], args[6]
    x, y, z = (
        functools.reduce(torch.unsqueeze, sorted(dims), factor)
        for factor, dims in zip(args[:3], expanded, strict=True)
    )
    first: Tensor = x * y
    rest: Tensor = first
    for d in summed:
        rest = rest.sum(d, keepdim=True) if d in expanded[2] else rest
    rest = rest * z
    return 2 * (first.numel() + rest.numel())


# Convolutions -----------------------------------------------------------------------------------------


@_formula("cudnn_convolution mkldnn_convolution miopen_convolution miopen_depthwise_convolution")
@_formula("_slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d")
@_formula("_conv_depthwise2d conv_depthwise3d")
def _plain_convolution(args: Sequence[Any], out: Tensor) -> int:
    """Count a convolution: each element of the result is a sum over the weights of one filter."""
    weight: Tensor = args[1]
    return 2 * out.numel() * math.prod(weight.shape[1:])


@_formula("cudnn_convolution_transpose miopen_convolution_transpose")
@_formula("slow_conv_transpose2d slow_conv_transpose3d")
def _transposed_convolution(args: Sequence[Any], out: Tensor) -> int:
    """Count a transposed convolution: each element of the input is multiplied by all weights of one filter."""
    return _plain_convolution(args, args[0])


@_formula("convolution _convolution convolution_overrideable")
def _convolution(args: Sequence[Any], out: Tensor) -> int:
    transposed = args[6]
    return _transposed_convolution(args, out) if transposed else _plain_convolution(args, out)


@_formula("convolution_backward convolution_backward_overrideable")
def _convolution_backward(args: Sequence[Any], out: Tensor) -> int:
    """Count a convolution's backward: the gradients of input and weight each take as many operations as forward."""
    grad, x, weight, *_, transposed, _, _, (of_input, of_weight, _) = args
    formula = _transposed_convolution if transposed else _plain_convolution
    return (bool(of_input) + bool(of_weight)) * formula((x, weight), grad)


@_formula("conv_tbc")
def _time_first_convolution(args: Sequence[Any], out: Tensor) -> int:
    """Count a convolution over time, in whose weight the last dimension indexes the channels of the result."""
    weight: Tensor = args[1]
    return 2 * out.numel() * math.prod(weight.shape[:-1])


# Attention --------------------------------------------------------------------------------------------


def _attention(query: Tensor, keys: int, value: Tensor) -> int:
    """Count the operations of attention: the scores of all keys, and the weighted sum of the values."""
    return 2 * math.prod(query.shape[:-1]) * keys * (query.shape[-1] + value.shape[-1])


def _attention_backward(query: Tensor, keys: int, value: Tensor) -> int:
    """Count attention's backward: compute the scores again, and two gradients for each of forward's two products."""
    return 2 * math.prod(query.shape[:-1]) * keys * (3 * query.shape[-1] + 2 * value.shape[-1])


@_formula("_scaled_dot_product_attention_math _scaled_dot_product_efficient_attention")
@_formula("_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu")
@_formula("_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable")
def _sdpa(args: Sequence[Any], out: Tensor) -> int:
    query, key, value, *_ = args
    return _attention(query, key.shape[-2], value)


@_formula("_scaled_dot_product_efficient_attention_backward")
@_formula("_scaled_dot_product_flash_attention_backward")
@_formula("_scaled_dot_product_flash_attention_for_cpu_backward")
@_formula("_scaled_dot_product_cudnn_attention_backward")
@_formula("_scaled_dot_product_fused_attention_overrideable_backward")
def _sdpa_backward(args: Sequence[Any], out: Tensor) -> int:
    _, query, key, value, *_ = args
    return _attention_backward(query, key.shape[-2], value)


# In the next four operators, the dimension of tokens comes before that of heads. Jagged sequences are concatenated, and
# their lengths are unknown, so each query is assumed to have as many keys as the longest sequence.


@_formula("_flash_attention_forward")
def _flash(args: Sequence[Any], out: Tensor) -> int:
    query, _, value, _, _, _, longest, *_ = args
    return _attention(query, longest, value)


@_formula("_flash_attention_backward")
def _flash_backward(args: Sequence[Any], out: Tensor) -> int:
    _, query, _, value, _, _, _, _, _, longest, *_ = args
    return _attention_backward(query, longest, value)


@_formula("_efficient_attention_forward")
def _efficient(args: Sequence[Any], out: Tensor) -> int:
    query, key, value, _, _, _, _, longest, *_ = args
    return _attention(query, key.shape[-3] if longest is None else longest, value)


@_formula("_efficient_attention_backward")
def _efficient_backward(args: Sequence[Any], out: Tensor) -> int:
    _, query, _, value, _, _, _, _, _, longest, *_ = args
    return _attention_backward(query, longest, value)


# Recurrent layers -------------------------------------------------------------------------------------


def _steps(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Count a recurrent layer: one product with a vector for each weight matrix, time step and sequence."""
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    return 2 * math.prod(x.shape[:-1]) * matrices


@_formula("_cudnn_rnn miopen_rnn")
def _recurrent(args: Sequence[Any], out: Tensor) -> int:
    x, weights, *_ = args
    return _steps(x, weights)


@_formula("_cudnn_rnn_backward miopen_rnn_backward")
def _recurrent_backward(args: Sequence[Any], out: Tensor) -> int:
    """Count a recurrent layer's backward: as many operations as forward, and as many again for gradients of weights."""
    *_, (_, _, _, of_weights) = args
    return (1 + bool(of_weights)) * _recurrent(args, out)


@_formula("lstm gru rnn_tanh rnn_relu")
def _recurrent_module(args: Sequence[Any], out: Tensor) -> int:
    x, *_ = args
    # An LSTM has a list of states before the list of weights.
    *_, weights = (arg for arg in args if isinstance(arg, list | tuple))
    return _steps(x, weights)


@_formula("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def _recurrent_cell(args: Sequence[Any], out: Tensor) -> int:
    x, _, of_input, of_state, *_ = args
    return _steps(x, (of_input, of_state))


@_formula("mkldnn_rnn_layer")
def _recurrent_layer(args: Sequence[Any], out: Tensor) -> int:
    x, of_input, of_state, *_ = args
    return _steps(x, (of_input, of_state))


@_formula("mkldnn_rnn_layer_backward")
def _recurrent_layer_backward(args: Sequence[Any], out: Tensor) -> int:
    """Count a recurrent layer's backward, which always computes gradients of input, states and weights."""
    return 2 * _recurrent_layer(args, out)
