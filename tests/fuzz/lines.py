"""The table of operators that random programs draw from."""

from __future__ import annotations

from typing import Any

from tests.fuzz import operators as o
from tests.fuzz.operators import Operator, every

_any = every()
_some = every(o.real, o.filled)
_row = every(o.real, o.dims(1), o.filled)
_matrix = every(o.single, o.dims(2, 2), o.filled)
_like = every(o.same_type, o.broadcasts)


def _rows(v: Any, first: Any, *_: Any) -> bool:
    return bool(v.shape[0] == first.shape[1])


_owned = every(o.real, o.not_overlapping)

POINTWISE = [
    Operator(text, (o.real,))
    for text in (
        "torch.sin({0})",
        "torch.tanh({0})",
        "torch.sigmoid({0})",
        "torch.relu({0})",
        "torch.exp(-{0} * {0})",
        "F.gelu({0})",
        "F.silu({0})",
        "{0}.abs()",
        "torch.clamp({0}, -0.5, 0.5)",
        "torch.rsqrt({0} * {0} + 1)",
        "{0} + {0}.detach().cos()",
        "{0}.clone()",
        "torch.zeros_like({0}) + 1",
    )
] + [
    Operator("{0} + {1}", (o.real, _like), weight=2),
    Operator("{0} * {1}", (o.real, _like), weight=2),
    Operator("{0} - {1}", (o.real, o.broadcasts)),
    Operator("torch.maximum({0}, {1})", (o.real, _like)),
    Operator("torch.atan2({0}, {1})", (o.real, _like)),
    Operator("torch.lerp({0}, {1}, 0.25)", (o.real, _like)),
    Operator("torch.addcmul({0}, {1}, {2}, value={c})", (o.real, _like, _like), o.number),
    Operator("torch.where({0} > 0, {0}, {1})", (o.real, _like)),
    Operator("torch.where({0}, {1}, {2})", (o.mask, every(o.real, o.broadcasts), every(o.real, o.broadcasts))),
    Operator("{0}.masked_fill({1}, {c})", (o.real, every(o.mask, o.broadcasts_into)), o.number),
    Operator("{0} * {c}", (o.real,), o.number),
    Operator("{0} + (({0} * 4).round() / 4 - {0}).detach()", (o.real,)),
    Operator("{0} * {1}", (o.real, every(o.mask, o.broadcasts_into)), weight=2),
    Operator("{0}.to({dtype})", (o.real,), o.dtype, weight=2),
]  # fmt: skip

PRODUCTS = [
    Operator("{0} @ {1} / 4", (every(o.real, o.dims(1, 3)), every(o.same_type, o.multiplies)), weight=6),
    Operator("{0} @ {0}.mT / 4", (every(o.real, o.dims(2, 3)),), weight=2),
    Operator("F.linear({0}, {1}) / 4", (every(o.real, o.dims(2, 3)), every(o.same_type, o.dims(2, 2), lambda v, x: v.shape[1] == x.shape[-1]))),
    Operator("torch.addmm({0}[0], {0}, {0}.mT @ {0}) / 4", (_matrix,)),
    Operator("torch.einsum('...i,...j->...ij', {0}, {0})", (every(o.single, o.dims(1, 2)),)),
    Operator("F.scaled_dot_product_attention({0}, {0}, {0}, dropout_p={p})", (every(o.single, o.dims(3, 3), o.filled),), lambda draw, v: {"p": draw(o.st.sampled_from([0.0, 0.3]))}),
    Operator("F.conv1d({0}, {0}[:2, :, :1])", (every(o.single, o.dims(3, 3), o.filled),)),
]  # fmt: skip

REDUCTIONS = [
    Operator("{0}.sum({dim}, keepdim={keep})", (every(o.real, o.dims(1)),), o.dim_keep),
    Operator("{0}.mean()", (_some,)),
    Operator("{0}.sum()", (o.real,)),
    Operator("torch.amax({0}, {dim}, keepdim={keep})", (_row,), o.dim_keep),
    Operator("{0} / ({0}.abs().amax({dim}, keepdim=True) + 1)", (_row,), o.dim),
    Operator("{0}.norm(float('inf'), {dim})", (_row,), o.dim),
    Operator("torch.logsumexp({0}, {dim})", (every(o.single, o.dims(1), o.filled),), o.dim),
    Operator("torch.softmax({0}, {dim})", (_row,), o.dim, weight=2),
    Operator("torch.log_softmax({0}, {dim})", (_row,), o.dim),
    Operator("torch.cumsum({0}, {dim})", (_row,), o.dim),
    Operator("F.layer_norm({0}, {0}.shape[-1:])", (every(o.single, o.dims(1), o.filled),), weight=2),
    Operator("F.group_norm({0}, 1)", (every(o.single, o.dims(2, 3), o.filled),)),
    Operator("F.batch_norm({0}, {1}, {2}, training=True)", (every(o.single, o.dims(2, 3), o.filled, lambda v: v.numel() > v.shape[1]), o.channels, every(o.channels, o.other_than(1))), spoils=(1, 2), weight=4),
    # The result of mse_loss keeps memory of the size of its arguments, whatever its fake says.
    Operator("F.huber_loss({0}, {1})", (_some, every(o.same_type, lambda v, x: v.shape == x.shape))),
]  # fmt: skip

SEVERAL = [
    Operator("torch.topk({0}, {k}, {dim})", (_row,), o.count),
    Operator("torch.sort({0}, dim={dim})", (_row,), o.dim),
    Operator("torch.max({0}, {dim})", (_row,), o.dim),
    Operator("torch.kthvalue({0}, {k}, {dim})", (every(o.single, o.dims(1), o.filled),), o.count),
    Operator("torch.cummax({0}, {dim})", (every(o.single, o.dims(1), o.filled),), o.dim),
    Operator("torch.var_mean({0}, {dim}, correction=0, keepdim={keep})", (every(o.single, o.dims(1), o.filled),), o.dim_keep),
    Operator("torch.aminmax({0}, dim={dim})", (_row,), o.dim),
    Operator("torch.native_layer_norm({0}, {0}.shape[-1:], None, None, 1e-5)", (every(o.single, o.dims(1), o.filled),)),
    Operator("torch.broadcast_tensors({0}, {1})", (o.real, o.broadcasts)),
]  # fmt: skip

#: Results that are several views of one memory.
PARTS = [
    Operator("{0}.chunk(2, {dim})", (_row,), o.dim),
    Operator("{0}.unbind({dim})", (every(o.dims(1), o.filled, lambda v: max(v.shape) <= 4),), o.dim),
    Operator("torch.split({0}, {k}, {dim})", (every(_row, lambda v: max(v.shape) <= 8),), o.count),
]  # fmt: skip

VIEWS = [
    Operator("{0}.mT", (o.dims(2),)),
    Operator("{0}.transpose({dim}, {other})", (o.dims(1),), o.two_dims),
    Operator("{0}.reshape({shape})", (_any,), o.new_shape),
    Operator("{0}.view({shape})", (o.contiguous,), o.new_shape),
    Operator("{0}.unsqueeze({dim})", (o.dims(0, 3),), o.dim),
    Operator("{0}.squeeze()", (_any,)),
    Operator("{0}.expand({shape})", (every(o.dims(0, 3), lambda v: v.numel() <= o.LARGEST // 9),), o.wider),
    Operator("{0}.narrow({dim}, {start}, {length})", (o.dims(1),), o.part, weight=2),
    Operator("{0}.select({dim}, {at})", (every(o.dims(1), o.filled),), o.place),
    Operator("{0}[..., ::2]", (o.dims(1),)),
    Operator("{0}.diagonal()", (o.dims(2),)),
    Operator("{0}.as_strided({size}, {stride}, {offset})", (o.has_room,), o.strides),
    Operator("{0}.unfold({dim}, {k}, 1)", (_row,), o.count),
    Operator("{0}.flatten()", (_any,)),
    Operator("{0}.detach()", (_any,)),
    Operator("{0}.contiguous()", (_any,)),
    Operator("torch.cat([{0}, {1}], {dim})", (every(o.real, o.dims(1)), every(o.same_type, lambda v, x: v.shape == x.shape)), o.dim),
    Operator("torch.stack([{0}, {0} * 2])", (every(o.real, o.dims(0, 3)),)),
]  # fmt: skip

COMPLEX = [
    Operator("torch.complex({0}, torch.sin({0}))", (o.single,)),
    Operator("{0} * {0}.conj()", (o.complex_,), weight=2),
    Operator("torch.view_as_real({0}.resolve_conj())", (o.complex_,), weight=2),
    Operator("{0}.abs()", (o.complex_,)),
    Operator("{0}.real", (o.complex_,)),
]

WHOLE = [
    Operator("{0} > {c}", (o.real,), o.number),
    Operator("torch.argmax({0}, {dim})", (_row,), o.dim),
    Operator("torch.argsort({0}, dim={dim})", (_row,), o.dim),
    Operator("({0} * 3).to(torch.int64)", (o.real,)),
    Operator("{0} == {0}.amax({dim}, keepdim=True)", (_row,), o.dim, weight=2),
    Operator("{0} >= {0}.mean()", (_some,)),
    Operator("({0}[..., None] < {0}[..., None, :]).sum(-1)", (every(_row, lambda v: v.numel() * v.shape[-1] <= o.LARGEST),), weight=2),
    Operator("torch.searchsorted({0}.detach().sort(-1).values, {0})", (every(_row, o.contiguous),)),
    Operator("torch.bucketize({0}, torch.tensor([-0.5, 0.0, 0.5], dtype={0}.dtype))", (o.real,)),
    Operator("torch.count_nonzero(torch.relu({0}), {dim})", (_row,), o.dim),
    Operator("{0}.sum()", (o.mask,)),
    Operator("~{0}", (o.mask,)),
    Operator("torch.arange({n})", (every(o.dims(1), o.filled),), o.indexed),
    Operator("torch.index_select({0}, {dim}, {1} % {n})", (_row, every(o.whole, o.dims(1, 1))), o.indexed, weight=2),
    Operator("{0}[{1} % {0}.shape[0]]", (_row, every(o.whole, o.dims(1, 1)))),
    Operator("torch.gather({0}, -1, {1} % {0}.shape[-1])", (_row, every(o.whole, lambda v, x: v.dim() == x.dim() and v.shape[:-1] == x.shape[:-1])), weight=2),
    Operator("F.embedding({1} % {0}.shape[0], {0})", (every(o.single, o.dims(2, 2), o.filled), every(o.whole, o.dims(1, 2)))),
    Operator("{0}.index_add({dim}, torch.arange({n}), {0})", (_row,), o.indexed),
    Operator("F.cross_entropy({0}, {1} % {0}.shape[1])", (every(o.single, o.dims(2, 2), o.filled), every(o.whole, o.dims(1, 1), lambda v, x: v.shape[0] == x.shape[0])), weight=3),
]  # fmt: skip

RANDOM = [
    Operator("F.dropout({0}, 0.4)", (o.real,), weight=4),
    Operator("{0} + torch.randn_like({0})", (o.real,), weight=2),
    Operator("{0} * torch.rand({shape})", (o.single,), o.shape),
    Operator("torch.rand({shape})", (_any,), o.shape),
    Operator("torch.bernoulli(torch.sigmoid({0}.nan_to_num()))", (_some,)),
    Operator("torch.multinomial(torch.softmax(torch.tanh({0}.nan_to_num()), -1), 2, replacement=True)", (every(o.single, o.dims(1, 2), o.filled),)),
    Operator("torch.randperm({n})", (every(o.dims(1), o.filled),), o.indexed),
    Operator("torch.randint(0, 5, {shape})", (_any,), o.shape),
    Operator("torch.normal({0}, 1.0)", (o.single,)),
    Operator("F.rrelu({0}, training=True)", (o.single,)),
    Operator("F.alpha_dropout({0}, 0.3, training=True)", (o.single,)),
    Operator("torch.empty_like({0}).uniform_()", (o.real,)),
    Operator("torch.empty_like({0}).bernoulli_(0.5)", (o.real,)),
]  # fmt: skip

FUNCTIONS = [
    Operator("Scaled.apply({0}, {c})", (o.real,), o.number, weight=2),
    Operator("Gated.apply({0}, {1})", (o.single, every(o.single, lambda v, x: v.shape == x.shape and v is not x)), weight=2),
    Operator("NoisyBackward.apply({0})", (o.single,)),
    Operator("without_grad({0})", (o.real,)),
    Operator("Updating.apply({0}, {1})", (o.single, every(_owned, o.single, o.plain, o.other_than(0), lambda v, x: v.shape == x.shape)), spoils=(1,), weight=4),
]  # fmt: skip

IN_PLACE = [
    Operator(text, (_owned, *more), draws, writes=True)
    for text, more, draws in (
        ("{0}.add_({1})", (every(o.real, o.broadcasts_into, o.other_than(0)),), o.number),
        ("{0}.mul_({c})", (), o.number),
        ("{0}.relu_()", (), o.number),
        ("{0}.sin_()", (), o.number),
        ("{0}.copy_({1})", (every(o.real, o.broadcasts_into, o.other_than(0)),), o.number),
        ("{0}.zero_()", (), o.number),
        ("{0}.masked_fill_({1}, {c})", (every(o.mask, o.broadcasts_into),), o.number),
        ("{0}.clamp_(-0.5, 0.5)", (), o.number),
        ("F.dropout({0}, 0.3, inplace=True)", (), o.number),
        ("{0}.normal_()", (), o.number),
        ("{0}.bernoulli_(0.5)", (), o.number),
        ("{0}.addcmul_({1}, {1})", (every(o.same_type, o.broadcasts_into, o.other_than(0)),), o.number),
    )
] + [
    Operator(text, (every(_owned, o.dims(1), o.filled), *more), draws, writes=True, weight=2)
    for text, more, draws in (
        ("{0}.narrow({dim}, {start}, {length}).mul_(2)", (), o.part),
        ("{0}.select({dim}, {at}).fill_(0.5)", (), o.place),
        ("{0}.select({dim}, {at}).add_({0}.select({dim}, 0).clone())", (), o.place),
        ("{0}[..., ::2].neg_()", (), o.dim),
        ("{0}.as_strided({size}, {stride}, {offset}).cos_()", (), o.strides),
        ("{0}.index_fill_({dim}, torch.tensor([0]), 1.5)", (), o.dim),
        ("{0}.index_put_(({1} % {0}.shape[0],), torch.ones(()).to({0}.dtype), accumulate=True)", (every(o.whole, o.dims(1, 1)),), o.dim),
        ("{0}.transpose({dim}, {other}).tanh_()", (), o.two_dims),
        ("{0}.view(-1)[0].mul_(3)", (), o.dim),
    )
]  # fmt: skip

CUSTOM = [
    Operator("noisy({0})", (o.real,), weight=3),
    Operator("counter({0})", (o.real,), weight=3),
    Operator("tagged({0})", (o.real,), weight=2),
    Operator("bent({0})", (o.real,), weight=2),
    Operator("bent({0}) * bent({0})", (o.real,)),
    Operator("noisy({0}) * noisy({0})", (o.real,)),
]

#: What is computed from something that is not differentiated, and may be written to later.
READS = [
    Operator("{0} * torch.cos({1})", (o.real, every(_like, o.plain)), weight=2),
    Operator("{0} * torch.exp(-{1} * {1}).sum()", (o.single, every(o.single, o.plain))),
    Operator(
        "{0} @ torch.tanh({1} @ {1}.mT) / 4",
        (every(o.single, o.dims(2, 2)), every(o.single, o.dims(2, 2), o.plain, _rows)),
    ),
]

#: What a buffer goes through: written to where nothing is differentiated.
BUFFERS = [
    Operator(f"with torch.no_grad():\n    {text}", (every(_owned, o.plain), *more), o.number, writes=True)
    for text, more in (
        ("{0}.mul_(0.5).add_(0.1)", ()),
        ("{0}.lerp_({1}, 0.1)", (every(o.same_type, o.broadcasts_into, o.other_than(0)),)),
        ("{0}.copy_({1})", (every(o.real, o.broadcasts_into, o.other_than(0)),)),
        ("{0}.normal_()", ()),
        ("{0}.t_()", ()),
        ("stir({1}, {0})", (every(o.real, o.other_than(0)),)),
    )
]  # fmt: skip

_selects = every(o.mask, lambda v, x: v.shape == x.shape)
_scalar = every(o.whole, o.dims(0, 0))

#: Sizes that the data tells; Dynamo alone traces them.
OF_DATA = [
    Operator("masked({0}, {1})", (every(o.real, o.filled), _selects), weight=2),
    Operator("chosen({0}, {1})", (_row, every(o.mask, o.dims(1, 1), lambda v, x: v.shape[0] == x.shape[0]))),
    Operator("chosen({0}, {0}.flatten(1).sum(1) > 0)", (every(o.real, o.dims(2), o.filled),), weight=3),
    Operator("masked({0}, {0} > 0)", (_row,), weight=2),
    Operator("counted({0}, ({0} > 0).sum())", (_row,), weight=3),
    Operator("counted({0}, {1})", (_row, _scalar)),
    Operator("split_at({0}, ({0} > 0).sum())", (_row,)),
]  # fmt: skip

#: How often each group is drawn from.
Table = tuple[tuple[int, list[Operator]], ...]


def holds_at_any_size(op: Operator) -> bool:
    """Whether no size of a value is part of the text."""
    sizes = ("shape", "n", "size", "length", "at", "k")
    return not any(f"{{{name}}}" in op.text for name in sizes)


#: Everything, as groups with how often each is drawn from.
TABLE: Table = (
    (5, POINTWISE),
    (5, PRODUCTS),
    (3, REDUCTIONS),
    (2, SEVERAL),
    (1, PARTS),
    (4, VIEWS),
    (1, COMPLEX),
    (3, WHOLE),
    (4, RANDOM),
    (2, FUNCTIONS),
    (3, CUSTOM),
    (4, READS),
    (4, IN_PLACE),
    (3, BUFFERS),
)
