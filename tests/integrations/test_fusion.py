"""Which kernels of backward are one, and that nothing that was to run late runs early for it.

What a step takes by that, `tests.upstream.test_faults` measures.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code

from remat.graph.whole_graph import SIDE
from remat.integrations.near_fusions import NearFusions, PlannedOrder
from remat.integrations.workarounds import near_fusions, planned_order
from remat.torch_compat import (
    INDUCTOR,
    ExternKernelSchedulerNode,
    InductorChoices,
    inductor_config,
)


def schedule(*externs: int) -> SimpleNamespace:
    """A chain of 40 nodes; each reads the one before, and some of them are no kernels of Inductor's own."""
    nodes = {}
    for k in range(40):
        node = object.__new__(ExternKernelSchedulerNode) if k in externs else SimpleNamespace()
        reads = [SimpleNamespace(name=f"buf{k - 1}")] if k else []
        node.__dict__.update(  # type: ignore[attr-defined]
            min_order=k,
            max_order=k,
            unmet_dependencies=reads,
            get_name=lambda k=k: f"op{k}",
            get_nodes=lambda k=k: [nodes[f"op{k}"]],
            is_reduction=lambda k=k: k == 1,
            get_outputs=lambda k=k: [
                SimpleNamespace(users=[SimpleNamespace(node=nodes.get(f"op{k + 1}"))])
            ],
        )
        nodes[f"op{k}"] = node
    buffers = {f"buf{k}": SimpleNamespace(defining_op_name=lambda k=k: f"op{k}") for k in range(40)}
    return SimpleNamespace(name_to_node=nodes, name_to_buf=buffers)


@pytest.mark.parametrize(
    ("extern", "theirs", "joined"),
    [
        (1, True, True),
        (2, True, False),
        (30, True, False),
        (39, True, True),
        (1, False, False),  # what Inductor does not join stays apart
    ],
)
def test_no_kernel_waits_for_what_another_reads(
    extern: int, theirs: bool, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: theirs))
    made = schedule(extern)
    first, other = made.name_to_node["op1"], made.name_to_node["op39"]
    assert NearFusions().can_fuse_horizontal(made, first, other, 8) is joined
    assert NearFusions().can_fuse_horizontal(made, other, first, 8) is joined


@pytest.mark.parametrize(
    ("externs", "joined"),
    [
        ((), True),
        ((2,), True),
        ((30,), True),
        ((2, 3), False),
        ((2, 30), False),
        ((0, 2, 39), True),
    ],
)
def test_a_sum_does_not_wait_for_what_reads_it(externs: tuple[int, ...], joined: bool) -> None:
    made = schedule(*externs)
    first, other = made.name_to_node["op1"], made.name_to_node["op39"]
    assert NearFusions().can_fuse_vertical(made, first, other, 8) is joined
    assert NearFusions().can_fuse_vertical(made, made.name_to_node["op2"], other, 8)


@pytest.mark.parametrize(
    ("externs", "joined"), [((6,), True), ((30,), True), ((6, 30), False), ((7, 30), True)]
)
def test_an_operator_does_not_wait_for_another_reader_of_its_input(
    externs: tuple[int, ...], joined: bool
) -> None:
    made = schedule(*externs)
    first, other = made.name_to_node["op5"], made.name_to_node["op39"]
    assert NearFusions().can_fuse_vertical(made, first, other, 8) is joined


def test_choices_of_the_user_s_own_stay() -> None:
    class Mine(InductorChoices):
        def uuid(self) -> str:
            return "mine"

    assert INDUCTOR.choices is not None  # read here, as a thread keeps the class that it read first
    with inductor_config.patch(inductor_choices_class=Mine), ExitStack() as stack:
        near_fusions(fx.Graph(), True, stack)
        assert inductor_config.inductor_choices_class is Mine
    with INDUCTOR.set_choices_handler(Mine()), ExitStack() as stack:
        near_fusions(fx.Graph(), True, stack)
        assert isinstance(INDUCTOR.choices, Mine)
        assert not isinstance(INDUCTOR.choices, NearFusions)
    with INDUCTOR.set_choices_handler(InductorChoices()), ExitStack() as stack:
        near_fusions(fx.Graph(), True, stack)
        assert isinstance(INDUCTOR.choices, NearFusions)
        assert inductor_config.inductor_choices_class is NearFusions


T = torch.Tensor


def early_and_late(x: T, wide: T, narrow: T) -> tuple[T, T, T]:
    early = x.tanh()
    product = x @ wide
    small = (product @ product.t()).sum()
    return early, small, early * (x @ narrow)


@pytest.mark.parametrize("planned", [False, True])
def test_products_run_in_their_order_even_if_an_early_kernel_needs_a_late_one(
    planned: bool,
) -> None:
    """Inductor makes one kernel of `early` and the last sum, and runs it first."""
    given = torch.randn(8, 8), torch.randn(8, 64), torch.randn(8, 8)
    settings = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    order = PlannedOrder() if planned else None
    with inductor_config.patch(_post_fusion_custom_pass=order, **settings):
        torch.compiler.reset()
        results, (code,) = run_and_get_code(torch.compile(early_and_late), *given)
    made = [int(k) for k in re.findall(r"extern_kernels.mm\(.*out=buf(\d+)", code)]
    assert (made == sorted(made)) is planned
    torch.testing.assert_close(results, early_and_late(*given))


def fused(k: int, *reads: int, last: int | None = None, draws: bool = False) -> Any:
    """Node ``k`` of a schedule after fusion."""
    node = object.__new__(ExternKernelSchedulerNode) if draws else SimpleNamespace()
    rand = fx.Graph().call_function(torch.ops.aten.rand.default, ([2],))
    node.__dict__.update(
        min_order=k,
        unmet_dependencies=[SimpleNamespace(name=f"buf{read}") for read in reads],
        get_buffer_names=lambda: {f"buf{k}", *([f"buf{last}"] if last else [])},
        node=SimpleNamespace(get_origins=lambda: [rand]),
    )
    return node


def places(nodes: list[Any]) -> list[int]:
    return [n.min_order for n in PlannedOrder()(nodes)]


def test_a_kernel_waits_for_its_operators_and_draws_keep_their_order() -> None:
    # Kernel 1 also computes 6, from 5. Inductor has moved 5 ahead.
    assert places([fused(0), fused(5), fused(1, 0, 5, last=6), fused(2, 0), fused(4, 1)]) == [
        *(0, 2, 5, 1, 4)
    ]
    # Draw 2 waits for kernel 1, and draw 3 for draw 2.
    late = [fused(5), fused(1, 5, last=6), fused(2, 1, draws=True), fused(3, draws=True), fused(4)]
    assert places(late) == [4, 5, 1, 2, 3]
    # Kernel 1 reads draw 5, and the earlier draw 2 reads kernel 1: the order stays as it was.
    circle = [fused(5, draws=True), fused(1, 5, last=6), fused(2, 1, draws=True), fused(3)]
    assert places(circle) == [5, 1, 2, 3]


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_in_one_graph_keeps_its_order(whole: bool) -> None:
    """Inductor would move operators of a graph without backward to their first readers."""
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    node.meta |= {SIDE: 1} if whole else {}
    graph.output(node)
    with ExitStack() as stack:
        planned_order(graph, False, stack)
        assert inductor_config.reorder_for_locality is not whole
    assert inductor_config.reorder_for_locality
