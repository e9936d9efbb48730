"""What is known to be a function of its inputs, and how that is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._library.effects import EffectType

import remat
from remat.graph import ops, purity

T = torch.Tensor
aten = torch.ops.aten


@torch.library.custom_op("remat_purity::unknown", mutates_args=())
def unknown(x: T) -> T:
    return x + torch.randn(x.shape)


@torch.library.custom_op("remat_purity::writes", mutates_args=("x",))
def writes(x: T) -> T:
    return x.add_(1).clone()


@torch.library.custom_op(
    "remat_purity::seeded", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,)
)
def seeded(x: T) -> T:
    return x.normal_().clone()


@torch.library.custom_op("remat_purity::effect", mutates_args=())
def effect(x: T) -> T:
    return x.clone()


torch.library._register_effectful_op("remat_purity::effect", EffectType.ORDERED)

OPERATOR = torch.ops.remat_purity.unknown.default


@pytest.fixture(autouse=True)
def _nothing_declared() -> Iterator[None]:
    yield
    for op in (unknown, writes):
        remat.undeclare_pure(op)


def _id(value: object) -> str:
    """The same name in every process: functions print with their addresses."""
    return str(getattr(value, "__name__", value))


def call(target: Any, *args: Any) -> fx.Node:
    graph = fx.Graph()
    node = graph.call_function(target, (*args, graph.placeholder("x")))
    fx.GraphModule({}, graph)
    return node


def calling(inner: Any) -> fx.Node:
    """A higher-order operator that calls a graph with one operator in it, two graphs down."""
    graph = fx.Graph()
    graph.output(graph.call_function(inner, (graph.placeholder("x"),)))
    module = fx.GraphModule({}, graph)
    for _ in range(2):
        outer = fx.Graph()
        target: Any = torch.ops.higher_order.invoke_subgraph
        node = outer.call_function(target, (outer.get_attr("body"), "body", outer.placeholder("x")))
        outer.output(node)
        module = fx.GraphModule({"body": module}, outer)
    return module.graph.find_nodes(op="call_function", target=target)[0]


WAYS: dict[str, Callable[[Any], fx.Node]] = {
    "by itself": call,
    "made functional": lambda op: call(torch.ops.higher_order.auto_functionalized_v2, op),
    "two graphs down": calling,
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_has_declared_it(way: str) -> None:
    node = WAYS[way](OPERATOR)
    assert ops.is_opaque(node)
    assert not ops.is_plain(node)
    assert ops.draws_in_order(node)
    assert ops.opaque_operators(node) == [OPERATOR]
    remat.declare_pure(unknown)
    assert not ops.is_opaque(node)
    assert not ops.may_have_effects(node)
    assert ops.declared_operators(node) == ["remat_purity::unknown"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "target", [aten.sin.default, torch.ops.prims.cos.default, seeded._opoverload], ids=_id
)
def test_schema_and_tags_are_enough(way: str, target: Any) -> None:
    node = WAYS[way](target)
    assert not ops.is_opaque(node)
    assert ops.is_random(node) == (target is seeded._opoverload)


def test_a_draw_that_is_replayed_is_no_draw() -> None:
    node = call(torch.ops.higher_order.run_with_rng_state, torch.zeros(1), aten.rand_like.default)
    assert not ops.is_random(node)


def of_nobody(x: T) -> T:
    return x


@pytest.mark.parametrize(
    ("target", "known"),
    [
        (fx.Node, True),
        (of_nobody, False),
        (triton_kernel_wrapper_functional, True),
        (torch.ops.higher_order.call_torchbind, False),
        (torch.ops.aten.sin, True),
        (torch.ops.remat_purity.unknown, False),
        (max, True),
        (torch.sym_max, True),
    ],
    ids=_id,
)
def test_who_speaks_for_himself(target: Any, known: bool) -> None:
    assert purity.has_complete_schema(target) is known


@pytest.mark.parametrize(
    "op",
    [
        unknown,
        torch.ops.remat_purity.unknown,
        torch.ops.remat_purity.unknown.default,
        "remat_purity::unknown",
        "remat_purity::unknown.default",
    ],
    ids=_id,
)
def test_an_operator_is_named_in_many_ways(op: Any) -> None:
    assert remat.declare_pure(op) is op
    assert ops.is_known(OPERATOR)
    assert "remat_purity::unknown" in ops.declarations()
    remat.undeclare_pure(op)
    assert not ops.is_known(OPERATOR)
    assert "remat_purity::unknown" not in ops.declarations()


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("unknown", "'unknown' names no operator; expected 'namespace::name'"),
        ("remat_purity::", "names no operator"),
        ("remat_purity::unknwon", "no operator 'remat_purity::unknwon' is registered"),
        ("remat_purity::unknown.out", "has no overload 'out'; it has default"),
        (torch.sin, "is no operator; expected its name"),
        (None, "None is no operator"),
        (seeded, "'remat_purity::seeded' .* its tag nondeterministic_seeded"),
        (aten.rand_like, "'aten::rand_like' .* its tag nondeterministic_seeded"),
        (effect, "'remat_purity::effect' .* an effect is registered"),
    ],
    ids=_id,
)
def test_what_cannot_be_declared_is_refused_by_name(op: Any, told: str) -> None:
    before = ops.declarations()
    with pytest.raises(remat.RematError, match=told):
        remat.declare_pure(op)
    assert ops.declarations() == before


def test_what_writes_stays_an_effect_where_it_writes() -> None:
    remat.declare_pure(writes)
    assert ops.is_effectful(call(writes._opoverload))
    assert not ops.may_have_effects(WAYS["made functional"](writes._opoverload))


def test_an_operator_of_the_same_name_in_another_library_is_another() -> None:
    remat.declare_pure("remat_purity::unknown")
    with torch.library._scoped_library("remat_purity_2", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        assert not ops.is_known(torch.ops.remat_purity_2.unknown.default)


def _defined_elsewhere(namespace: str) -> Any:
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("remat_noise(Tensor x) -> Tensor")
    _LIBRARIES.append(library)
    return getattr(torch.ops, namespace).remat_noise.default


_LIBRARIES: list[torch.library.Library] = []


@pytest.mark.parametrize("namespace", ["aten", "prims", "torchvision"])
def test_a_namespace_of_pytorch_vouches_for_nothing(namespace: str) -> None:
    assert not ops.is_known(_defined_elsewhere(namespace))
    torch.library.define(f"{namespace}::remat_by_function", "(Tensor x) -> Tensor")
    assert not ops.is_known(getattr(torch.ops, namespace).remat_by_function.default)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:  # type: ignore[override]
        return x + torch.rand_like(x)


@pytest.mark.parametrize("function", [Doubled.apply, torch.nn.Dropout(0.5), torch.rand_like])
@pytest.mark.parametrize("namespace", ["remat_purity", "prims"])
def test_a_function_of_pytorchs_vouches_for_nothing(namespace: str, function: Any) -> None:
    name = f"{namespace}::by_{getattr(function, '__name__', 'module')}"
    made = torch.library.custom_op(name, function, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert not ops.is_known(made._opoverload)
