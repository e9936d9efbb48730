"""The ready-made pairs, number by number, and what hooks are known by."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import remat
from remat.errors import ProblemError
from remat.graph.memory.host_copies import offload, reload
from remat.passes.packing.pairs import PAIRS

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOSSY = ("bf16", "float8", "int8")
INF, NAN = math.inf, math.nan


def through(name: str, x: torch.Tensor) -> torch.Tensor | None:
    """What comes back from a pair; None where it declines."""
    packed = PAIRS[name].pack(x)
    return None if packed is x else PAIRS[name].unpack(packed)


def packed_bytes(packed: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(packed)
    return sum(v.nbytes for v in leaves if isinstance(v, torch.Tensor))


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_what_comes_back_is_near(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(96, 64).t() * torch.logspace(-3, 3, 64)[:, None]).to(dtype)
    y = through(name, x)
    if y is None:
        assert name == "bf16"
        assert dtype is not torch.float32, "what has two bytes stays, and what has another range"
        return
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    away, size = (y.double() - x.double()).abs(), x.double().abs()
    slack = 2 * torch.finfo(dtype).eps * size.amax(1, keepdim=True)
    if name == "bf16":
        assert (away <= size * 2**-8).all()
    elif name == "float8":  # relative within 2^17 of the largest number, then absolute
        assert (away <= (size / 16).clamp_min(float(size.max()) / 416 * 2**-9) * 1.02).all()
    else:
        step = (size.amax(1, keepdim=True) / 126).clamp_min(torch.finfo(dtype).tiny)
        assert (away <= step / 2 + slack).all()
    assert away.max() > 0, "nothing was lost, so nothing was packed"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_comes_back(name: str, dtype: torch.dtype) -> None:
    """Masks are made of infinities, or of the largest number there is, which stays finite."""
    most = torch.finfo(dtype).max
    x = torch.tensor(
        [[0, INF, -INF, NAN, 1, -2], [most, -most, 0, 1, -INF, NAN], [0, 0, 0, 0, 0, 0]],
        dtype=dtype,
    )
    y = through(name, x)
    if y is None:
        return
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.isposinf(), x.isposinf())
    assert torch.equal(y.isneginf(), x.isneginf())
    nearest = min(most, torch.finfo(torch.bfloat16).max) if name == "bf16" else most
    assert abs(y[1, 0].item() / nearest - 1) < 0.01
    assert y[1, 1] == -y[1, 0]
    assert (y[2] == 0).all()
    if name == "int8":  # a row that overflows spoils no other row
        torch.testing.assert_close(y[0, 4:], x[0, 4:])


@pytest.mark.parametrize("name", LOSSY)
def test_masks_come_back(name: str) -> None:
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    for blocked in (-INF, torch.finfo(torch.bfloat16).min):
        mask = torch.where(causal, 0.0, blocked)
        back = through(name, mask)
        assert back is not None
        torch.testing.assert_close(back, mask, rtol=1e-6, atol=0)


def test_how_much_room_they_take() -> None:
    x = torch.randn(32, 64)
    assert packed_bytes(PAIRS["bf16"].pack(x)) == x.nbytes // 2
    assert packed_bytes(PAIRS["float8"].pack(x)) == x.nbytes // 4 + 4
    assert packed_bytes(PAIRS["int8"].pack(x)) == x.nbytes // 4 + 32 * 4


@pytest.mark.parametrize("name", LOSSY)
def test_pairs_decline_what_they_cannot_make_smaller(name: str) -> None:
    for x in (
        torch.arange(6),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.complex64),
    ):
        assert through(name, x) is None, x.dtype


# Offloading ---------------------------------------------------------------------------------------


def test_offloading_declines_what_lies_in_the_host_memory() -> None:
    assert through("cpu-offload", torch.randn(3)) is None


def test_offloading_goes_to_the_host_and_back() -> None:
    """On a device without memory of its own, since there may be no GPU: the way, not the numbers."""
    x = torch.empty(4, 6, device="meta").t()
    host, device = PAIRS["cpu-offload"].pack(x)
    assert (host.device.type, device.type) == ("cpu", "meta")
    back = PAIRS["cpu-offload"].unpack((host, device))
    for y in (host, back):
        assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert back.device == x.device


def test_the_copies_of_offloading_are_copies() -> None:
    x = torch.randn(5, 7).t()
    for y in (offload(x), reload(x, torch.device("cpu"))):
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()
        assert y.stride() == x.stride()
    torch.library.opcheck(offload, (x,))
    torch.library.opcheck(reload, (x, torch.device("cpu")))


# What is given ------------------------------------------------------------------------------------


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def test_hooks_are_given_as_a_name_a_pair_or_hooks() -> None:
    hooks = remat.SavedTensorHooks(pack=twice, unpack=half)
    assert remat.SavedTensorHooks.of(hooks) is hooks
    assert remat.SavedTensorHooks.of((twice, half)) == hooks
    assert remat.SavedTensorHooks.of("int8") is PAIRS["int8"]
    assert replace(PAIRS["int8"], filter="all").filter == "all"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: remat.SavedTensorHooks.of("int4"), "name of a ready-made pair"),
        (lambda: remat.SavedTensorHooks.of((twice,)), "tuple"),
        (lambda: remat.SavedTensorHooks.of(7), "hooks is 7"),
        (lambda: remat.SavedTensorHooks(pack=twice, unpack=half, filter="some"), "'no_static'"),
        (lambda: remat.SavedTensorHooks(pack=twice, unpack=half, min_bytes=-1), "min_bytes is -1"),
        (lambda: remat.SavedTensorHooks(pack=twice, unpack=3), "unpack is a int"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        make()


# What they are known by ---------------------------------------------------------------------------


def test_ready_made_pairs_are_known() -> None:
    keys = {n: h.cache_key for n, h in PAIRS.items()}
    assert len(set(keys.values()) - {None}) == len(PAIRS)
    borrowed = remat.SavedTensorHooks(pack=twice, unpack=half, name="float8")
    assert borrowed.cache_key is None, "a name alone is no key"


def test_options_are_part_of_the_key() -> None:
    pair = PAIRS["bf16"]
    variants = [
        replace(pair, **c) for c in ({}, {"filter": "all"}, {"min_bytes": 9}, {"lossy": False})
    ]
    assert len({v.cache_key for v in variants}) == len(variants)


def test_functions_are_known_by_their_own_hash() -> None:
    class Leaf:
        def __init__(self, digest: str | None) -> None:
            if digest is not None:
                self.user_cache_hash = digest

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def key(pack: str | None, unpack: str | None) -> str | None:
        return remat.SavedTensorHooks(pack=Leaf(pack), unpack=Leaf(unpack)).cache_key

    assert key("one", "two") == key("one", "two")
    assert key("one", "two") != key("two", "one")
    assert key("one", None) is None
    assert remat.SavedTensorHooks.of((twice, half)).cache_key is None


@fx.wrap  # type: ignore[untyped-decorator]
def leaf(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def through_leaf(x: torch.Tensor) -> torch.Tensor:
    return leaf(x) * 2  # type: ignore[no-any-return]


def test_graph_modules_are_known_by_their_operators_and_leaves() -> None:
    plain = fx.symbolic_trace(twice), fx.symbolic_trace(half)
    again = fx.symbolic_trace(twice), fx.symbolic_trace(half)
    other = fx.symbolic_trace(twice), fx.symbolic_trace(twice)
    keys = [remat.SavedTensorHooks.of(p).cache_key for p in (plain, again, other)]
    assert keys[0] is not None
    assert keys[0] == keys[1] != keys[2]
    wrapping = fx.symbolic_trace(through_leaf)
    assert remat.SavedTensorHooks.of((wrapping, plain[1])).cache_key is None
    for node in wrapping.graph.nodes:
        if node.meta.get("is_wrapped"):
            node.meta["user_cache_hash"] = "leaf of 2026"
    assert remat.SavedTensorHooks.of((wrapping, plain[1])).cache_key is not None


def test_hooks_that_are_known_are_pickled_by_what_they_are_known_by() -> None:
    def named(x: torch.Tensor) -> torch.Tensor:  # no module has it under this name
        return x

    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(remat.SavedTensorHooks.of((named, named)))
    named.user_cache_hash = "identity"  # type: ignore[attr-defined]
    hooks = remat.SavedTensorHooks(pack=named, unpack=named, min_bytes=3)
    assert pickle.loads(pickle.dumps(hooks)) == hooks
    assert pickle.loads(pickle.dumps(PAIRS["int8"])) == PAIRS["int8"]


def test_graph_modules_with_numbers_of_their_own_are_not_known() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    traced = fx.symbolic_trace(Scaled())
    assert remat.SavedTensorHooks.of((traced, traced)).cache_key is None
