"""What a plan says of itself."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from remat.planning.reading.node_rows import kept_storages, price, runs_of
from remat.report.explanation import MOST_DECLARED
from remat.solvers.graph.problem import GraphProblem
from remat.units import format_cost
from tests.graphs import joint_of, weight


def chain(**changes: object) -> GraphProblem:
    """0 is an input; 1 to 4 follow one another and cost 10, 20, 40, 80; backward reads 2 and 4."""
    fields = {
        "names": ("x", "a", "b", "c", "d"),
        "inputs": ((), (0,), (1,), (2,), (3,)),
        "cost": (0, 10, 20, 40, 80),
        "size": (0, 8, 8, 8, 8),
        "savable": (True,) * 5,
        "recomputable": (False, True, True, True, True),
        "in_forward": (True,) * 5,
        "needed": (2, 4),
    }
    return GraphProblem(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "kept_too", "node", "expected"),
    [
        ({}, {2, 4}, 4, 80 + 40),  # its chain from what else is there
        ({}, {2, 4}, 2, 20 + 10),
        ({}, {4}, 4, 150),
        ({}, {3, 4}, 4, 80),  # 3 is recomputed anyway
        ({}, {2}, 0, None),
        ({"recomputable": (False, True, True, True, False)}, {2, 4}, 4, None),
        # 3 would have to be kept then
        ({"recomputable": (False, True, True, False, True)}, {2, 4}, 4, 80),
        # what forward does not need runs once for nothing
        ({"in_forward": (True, True, True, False, True)}, {2, 4}, 4, 80),
    ],
)
def test_the_price_of_a_kept_node(
    changes: dict[str, object], kept_too: set[int], node: int, expected: int | None
) -> None:
    assert price(chain(**changes), kept_too, node) == expected


def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.mm(x, w).sin()
    return torch.mm(h, w).exp().sum()


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(mlp, weight(8, 8), weight(8, 8))


def test_each_kept_storage_is_listed_with_its_line(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 1, cost="flops")
    found = kept_storages(plan)
    assert sum(k.nbytes for k in found) == plan.saved_bytes
    assert {k.name for k in found} <= set(plan.saved)
    assert all(k.source.startswith("test_explanation.py:") for k in found)
    (sin,) = (k for k in found if k.op == "sin")
    assert sin.source.endswith("h = torch.mm(x, w).sin()")
    (cost,) = {c for n, c in zip(plan.problem.names, plan.problem.cost, strict=True) if n == "mm"}
    assert cost == 2 * 8**3
    kept_too = "mm" in {k.name for k in found}
    assert sin.price == 1 + (0 if kept_too else cost)


def test_what_runs_twice_is_listed_with_its_cost(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0, cost="flops")
    runs = [r for r in runs_of(plan) if r.again]
    assert sorted(r.node for r in runs) == sorted(plan.recomputed)
    assert sum(r.cost or 0 for r in runs) == plan.recompute_cost
    assert {r.op for r in runs} >= {"mm", "sin", "exp"}
    by_name = {r.node: r for r in runs}
    assert by_name["mm"].again == "read"  # by the cosine that is the gradient of the sine
    assert by_name["mm_1"].again == "on the way"
    text = plan.explain()
    costly = [r for r in runs if r.cost]
    cost = format_cost(plan.recompute_cost, "FLOP")
    assert f"recomputed operators: {len(costly)}, {cost}" in text
    assert "frees 256 B" in text
    assert "kept activations" not in text


@functools.cache
def stack(layers: int) -> remat.Plan:
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(layers)]
    return remat.plan(joint_of(nn.Sequential(*blocks), torch.randn(8, 16)), 0.5, "greedy")


def test_layers_are_grouped() -> None:
    """Eight layers take as many lines as four."""
    few, many = stack(4).explain().splitlines(), stack(8).explain().splitlines()
    assert len(many) == len(few)
    assert any(" in 5  tanh" in line for line in many)


def test_where_no_line_is_recorded_the_module_is_named() -> None:
    rows = [line for line in stack(4).explain().splitlines() if "tanh" in line or "addmm" in line]
    assert rows
    assert all(line.endswith(("Sequential / Tanh", "Sequential / Linear")) for line in rows)


def test_the_head_of_the_text_stays() -> None:
    plan = stack(4)
    lines = plan.explain().splitlines()
    head = "plan saved recomputed peak step without decided"
    assert [line.split()[0] for line in lines[:7]] == head.split()
    assert remat.Plan.from_json(plan.to_json()).explain().splitlines() == lines[:7]
    assert any(line.split()[:2] == ["bytes", "value"] for line in lines)


def test_tags_are_the_reason() -> None:
    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        save = op is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).exp()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).sum()

    text = remat.plan(joint_of(f, weight(8, 8), weight(8, 8)), 1).explain()
    rows = text.splitlines()
    assert any("sin" in r and "tagged MUST_SAVE" in r for r in rows)
    assert any("mm" in r and "tagged for recomputation" in r for r in rows)


def test_what_cannot_be_recomputed_says_so() -> None:
    """The state of the generator is all that is kept of a random draw that is replayed."""
    plan = remat.plan(
        joint_of(lambda x: (torch.rand_like(x) * x.sin()).exp().sum(), weight(64, 64)), 0
    )
    assert plan.saved_bytes == 5056
    (row,) = (r for r in plan.explain().splitlines() if "cannot be" in r)
    assert row.split()[:2] == ["4.94", "KiB"]


def undeclared_operators(names: list[str]) -> str:
    """What a plan says of operators that nobody has declared."""
    for name in names:
        if not hasattr(torch.ops.remat_explained, name):
            op = torch.library.custom_op(f"remat_explained::{name}", _twice, mutates_args=())
            op.register_fake(torch.empty_like)
            op.register_autograd(lambda ctx, g: g * 2)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = getattr(torch.ops.remat_explained, name)(torch.mm(x, w)).sin()
        return x.sum()

    return remat.plan(joint_of(f, weight(8, 8), weight(8, 8)), 0).explain()


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_condition_stands_before_what_is_to_be_pasted() -> None:
    text = undeclared_operators(["b", "a"])
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index('remat.declare_pure("remat_explained::a")')
    assert lines[at + 1] == 'remat.declare_pure("remat_explained::b")'
    assert "if it draws no random numbers, counts nothing" in lines[at - 1]
    assert "torch.compiler.reset()" in lines[at + 2]
    many = undeclared_operators([f"op{k}" for k in range(MOST_DECLARED + 2)])
    assert many.count("remat.declare_pure(") == MOST_DECLARED
    assert "and 2 more" in many


def test_counts_agree_and_one_is_singular() -> None:
    joint = joint_of(lambda x, w: torch.mm(x, w).sin().sum(), weight(8, 8), weight(8, 8))
    assert "in 1 storage\n" in remat.plan(joint, 1).explain() + "\n"
    plan = remat.plan(joint, 0, cost="flops")
    (name,) = plan.recomputed
    assert "  recomputed    1 node, views included, 1.024 kFLOP" in plan.explain(), name
    assert "recomputed operators: 1, 1.024 kFLOP" in plan.explain()


def test_where_everything_is_kept_no_bound_on_nothing_is_told(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, "saved:8GiB")
    (head, _, recomputed, *_) = plan.explain().splitlines()
    assert "budget 8 GiB saved," in head
    assert plan.recompute_cost == 0
    assert recomputed.split()[1:] == ["nothing"]
