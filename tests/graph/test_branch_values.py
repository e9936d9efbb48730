"""Branch values: found by what they compute, exempt where functions meet, and never computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import while_loop
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from remat.errors import BudgetError, PlanError
from remat.graph import ops
from remat.graph.branch_values import branches_on_16_bits, fix_branches
from remat.graph.index import index_graph
from remat.graph.roles import classify
from remat.graph.text import parse_joint, print_joint

Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor], Tensor]
LOWERINGS = ("eager", "inductor")


def gathered(x: Tensor, w: Tensor, rank: Callable[[Tensor], Tensor]) -> Tensor:
    """A router: products decide which rows of a table each token reads."""
    z = (x @ w).sin()
    return (w[rank(z)] * z.exp()).sum()


def top(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, w, lambda z: z.topk(1, -1).indices[:, 0])


def largest(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, w, lambda z: z.argmax(-1))


def largest_of_dim(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, w, lambda z: z.max(-1).indices)


def sorted_first(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, w, lambda z: z.sort(-1).indices[:, 0])


def ranked(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, w, lambda z: (z[:, :1] < z).sum(-1).clamp(max=7))


def bucketed(x: Tensor, w: Tensor) -> Tensor:
    edges = torch.arange(7.0)
    return gathered(x, w, lambda z: torch.bucketize(z[:, 0], edges))


def cast(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, w, lambda z: (z[:, 0].abs() * 7).long())


def gated(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).sin()
    return (z.exp() * (z > 0.5)).sum()


def stepped(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).sin()
    return (z.exp() * (z * 3).round().detach()).sum()


def until_large(x: Tensor, w: Tensor) -> Tensor:
    def body(y: Tensor) -> Any:
        return (torch.tanh(y @ w) + 1,)

    return while_loop(lambda y: y.sum() < 64, body, ((x @ w).sin(),))[0].exp().sum()


def only_largest(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).softmax(-1)
    return (z.exp() * (z == z.amax(-1, keepdim=True))).sum()


def nearest(x: Tensor, w: Tensor) -> Tensor:
    grid = (x @ w).tanh()[None].view(1, 4, 8, 2)
    return (
        F.grid_sample(w[None, None], grid, mode="nearest", align_corners=False) * grid[..., 0].exp()
    ).sum()


def sign_copied(x: Tensor, w: Tensor) -> Tensor:
    return (torch.copysign(torch.ones(()), (x @ w).sin()) * (x @ w).exp()).sum()


def over_threshold(x: Tensor, w: Tensor) -> Tensor:
    return F.threshold((x @ w).sin(), 0.5, 20.0).exp().sum()


def counted(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).sin()
    return (torch.linalg.vector_norm(F.relu(z - 0.5), ord=0, dim=-1) * z.exp().sum(-1)).sum()


def binned(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).sin()
    return (torch.histc(z.detach(), 8, -1, 1) * z.exp()).sum()


def gamma(x: Tensor, w: Tensor) -> Tensor:
    return (torch._standard_gamma((x @ w).softmax(-1) * 30) * (x @ w).exp()).sum()


def pooled_indices(x: Tensor, w: Tensor) -> Tensor:
    y, at = F.max_pool2d((x @ w)[None].sin(), 2, return_indices=True)
    return (w.flatten()[at] * y.exp()).sum()


def factors(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.svd((x @ w).sin(), full_matrices=False)[0].exp().sum()


#: Each program, with the operators of its branch values.
BRANCHES: dict[Program, set[str]] = {
    top: {"topk"},
    largest: {"argmax"},
    largest_of_dim: {"max"},
    sorted_first: {"sort"},
    ranked: {"lt"},
    bucketed: {"bucketize"},
    cast: {"_to_copy", "convert_element_type"},
    gated: {"gt"},
    stepped: {"round"},
    only_largest: {"eq"},
    until_large: {"while_loop_stack_output"},
    nearest: {"round", "grid_sampler_2d"},
    sign_copied: {"copysign"},
    over_threshold: {"le", "threshold"},
    counted: {"ne", "linalg_vector_norm"},
    binned: {"histc"},
    gamma: {"_standard_gamma", "run_with_rng_state", "run_and_save_rng_state"},
    pooled_indices: {
        "max_pool2d_with_indices",
        "_low_memory_max_pool_with_offsets",
        "_low_memory_max_pool_offsets_to_indices",
    },
    factors: {"_linalg_svd"},
}


def rectified(x: Tensor, w: Tensor) -> Tensor:
    return (F.relu(x @ w).sin() + F.hardtanh(x @ w.t()).sin() + (x @ w).abs().sin()).sum()


def leaky(x: Tensor, w: Tensor) -> Tensor:
    return (F.leaky_relu(x @ w).sin() + F.elu(x @ w) + F.softplus(x @ w) + F.hardswish(x @ w)).sum()


def pairwise(x: Tensor, w: Tensor) -> Tensor:
    return (torch.maximum(x @ w, x.sin()).exp() + F.smooth_l1_loss(x @ w, x.cos())).sum()


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).sin(), 0.3).exp().sum()


def dropped_paths(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin().exp() * (torch.rand(8, 1) + 0.7).floor()).sum()


def masked(x: Tensor, w: Tensor) -> Tensor:
    seen = torch.arange(8)[:, None] >= torch.arange(8)
    return (x @ w).masked_fill(~seen, -torch.inf).softmax(-1).sin().sum()


def guarded(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).sin()
    return torch.where(z.isnan() | (z == torch.inf), 0, z.exp()).sum()


def looped(x: Tensor, w: Tensor) -> Tensor:
    def body(i: Tensor, y: Tensor) -> Any:
        return i + 1, torch.tanh(y @ w)

    return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x.sin()))[1].exp().sum()


def of_inputs(x: Tensor, w: Tensor) -> Tensor:
    return (w[x.argmax(-1)] * (x @ w).exp() * (x.t() > 0.5)).sum()


def resized(x: Tensor, w: Tensor) -> Tensor:
    return F.interpolate((x @ w)[None, None], scale_factor=2.0).sin().sum()


EXEMPT = (
    rectified,
    leaky,
    pairwise,
    dropped,
    dropped_paths,
    masked,
    guarded,
    looped,
    of_inputs,
    resized,
)


def pooled(x: Tensor, w: Tensor) -> Tensor:
    return F.max_pool2d((x @ w)[None].sin(), 2).exp().sum()


def captured(program: Program, lower: Any, dtype: torch.dtype = torch.float32) -> remat.JointGraph:
    torch._dynamo.reset()
    x, w = (torch.rand(8, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    return remat.capture(program, (x, w), lower=lower)


def operators(joint: remat.JointGraph, positions: Any) -> set[str]:
    index = index_graph(joint.graph)
    return {ops.name_of(index.nodes[i].target) for i in positions}


def kept(joint: remat.JointGraph) -> Any:
    index = index_graph(joint.graph)
    return fix_branches(index, classify(joint, index))


@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize("program", BRANCHES, ids=lambda f: f.__name__)
def test_a_branch_value_is_saved_at_every_budget(program: Program, lower: str) -> None:
    joint = captured(program, lower)
    found = operators(joint, kept(joint).branches)
    assert found
    assert found <= BRANCHES[program]
    index = index_graph(joint.graph)
    names = {index.nodes[i].name for i in kept(joint).branches}
    for budget in (1, 0.5, 0, remat.Peak(0.5), remat.Peak(0)):
        plan = remat.plan(joint, budget)
        assert not names & {*plan.recomputed}
        assert not names & {n.name for n in plan.backward.graph.nodes if n.op == "call_function"}


class Routed(torch.autograd.Function):
    """Gathers by the largest score, which its backward looks up again."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(scores, table)
        return table.gather(1, scores.argmax(-1, keepdim=True))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        scores, table = ctx.saved_tensors
        at = scores.topk(1, -1).indices
        return torch.zeros_like(scores), torch.zeros_like(table).scatter(1, at, gradient)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_a_branch_of_backward_alone_reads_is_saved() -> None:
    def routed(x: Tensor, w: Tensor, table: Tensor) -> Tensor:
        z = (x @ w).sigmoid() * x * 0.37
        return Routed.apply(z.softmax(-1), table).sum() + z.sin().square().mean()

    torch._dynamo.reset()
    sizes = (256, 32), (32, 32), (256, 32)
    args = tuple(torch.rand(*size, requires_grad=True) for size in sizes)
    joint = remat.capture(routed, args, lower="eager")
    for budget in (0.5, 0, remat.Peak(0.3), remat.Peak(0)):
        plan = remat.plan(joint, budget)
        assert "_softmax" not in plan.recomputed


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_a_value_compared_with_the_largest_of_its_group_is_saved(reduce: str) -> None:
    def scattered(x: Tensor, w: Tensor) -> Tensor:
        at = (torch.arange(8) % 4).expand(8, 8)
        z = torch.zeros(8, 4).scatter_reduce(1, at, (x @ w).softmax(-1), reduce, include_self=False)
        return z.exp().sum()

    joint = captured(scattered, "eager")
    assert operators(joint, kept(joint).compared) == {"_softmax", "scatter_reduce"}


def test_checks_for_infinite_numbers_are_branches_of_float16_alone() -> None:
    def checked(x: Tensor, w: Tensor) -> Tensor:
        z = (x @ w).exp()
        return (z * torch.isinf(z * 3000)).sum()

    joint = captured(checked, "eager", torch.float16)
    assert operators(joint, kept(joint).branches)
    assert not kept(captured(checked, "eager")).branches


def test_random_numbers_of_16_bits_that_are_read_beside_their_mask_are_saved_or_the_mask_is() -> (
    None
):
    def drawn(x: Tensor, w: Tensor) -> Tensor:
        r = torch.rand_like(x @ w)
        return ((r < 0.3) * r.exp() * (x @ w)).sum()

    joint = captured(drawn, "inductor", torch.bfloat16)
    assert operators(joint, kept(joint).branches)


@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize("program", EXEMPT, ids=lambda f: f.__name__)
def test_masks_of_continuous_functions_and_exact_branches_may_run_again(
    program: Program, lower: str
) -> None:
    joint = captured(program, lower)
    assert not kept(joint).branches
    assert not kept(joint).compared


def test_what_is_exempt_stays_so_in_text() -> None:
    joint = captured(leaky, "inductor")
    read = parse_joint(print_joint(joint))
    assert print_joint(read) == print_joint(joint)
    assert not kept(read).branches
    assert remat.plan(read, 0).saved == remat.plan(joint, 0).saved


@pytest.mark.parametrize("lower", LOWERINGS)
def test_a_value_compared_with_its_maximum_is_saved(lower: str) -> None:
    joint = captured(lambda x, w: (x @ w).softmax(-1).amax(-1).sum(), lower)
    index, found = index_graph(joint.graph), kept(joint)
    (compared,) = found.compared
    assert index.nodes[compared].name in ("_softmax", "div")
    assert not found.branches
    for budget in (1, 0, remat.Peak(0)):
        assert index.nodes[compared].name in remat.plan(joint, budget).saved


@pytest.mark.parametrize("lower", LOWERINGS)
def test_the_indices_of_max_pooling_may_run_again(lower: str) -> None:
    assert not kept(captured(pooled, lower)).branches


def test_a_branch_on_saved_values_may_run_again() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        z = checkpoint(torch.matmul, x, w, use_reentrant=False, context_fn=saves_products)
        return (w[z.argmax(-1)] * z.exp()).sum()

    joint = captured(program, "eager")
    assert "argmax" in remat.plan(joint, 0).recomputed


def saves_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def tagging(policy: CheckpointPolicy) -> Program:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(
            lambda _, op, *args, **kwargs: (
                policy if op is torch.ops.aten.argmax.default else CheckpointPolicy.PREFER_RECOMPUTE
            )
        )

    def program(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(largest, x, w, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    return program


def test_must_recompute_on_a_branch_value_is_refused_with_operator_and_line() -> None:
    joint = captured(tagging(CheckpointPolicy.MUST_RECOMPUTE), "eager")
    with pytest.raises(
        PlanError, match=r"'argmax' is tagged MUST_RECOMPUTE.*branch value"
    ) as error:
        remat.plan(joint, 0)
    assert "test_branch_values.py" in str(error.value)
    assert "z.argmax(-1)" in str(error.value)


@pytest.mark.parametrize("name", ["sort", "getitem", "getitem_1"])
def test_must_recompute_on_an_element_beside_a_branch_value_is_refused(name: str) -> None:
    def ranked(x: Tensor) -> Tensor:
        return x.sin().sort(0).values.exp()

    joint = remat.capture(ranked, (torch.randn(4, 4, requires_grad=True),), lower="eager")
    node = next(node for node in joint.graph.nodes if node.name == name)
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    with pytest.raises(
        PlanError, match=rf"'{name}' is tagged .*aten.sort.default returns a branch"
    ):
        remat.plan(joint, 0)


def test_a_checkpointed_region_saves_its_branch_values() -> None:
    plan = remat.plan(captured(tagging(CheckpointPolicy.PREFER_RECOMPUTE), "eager"), 0)
    assert "argmax" in plan.saved
    assert "mm" in plan.recomputed


def test_a_policy_for_modules_leaves_branch_values_saved() -> None:
    class Router(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return top(x, w)

    torch._dynamo.reset()
    model = torch.nn.Module()
    model.router = Router()
    model.forward = lambda x, w: model.router(x, w).sin()  # type: ignore[operator,method-assign]
    x, w = (torch.rand(8, 8, requires_grad=True) for _ in range(2))
    joint = remat.capture(model, (x, w), lower="eager")
    plan = remat.plan(joint, 1, policies={"*router": "recompute"})
    assert "topk" not in plan.recomputed
    assert "mm" in plan.recomputed


def test_explain_lists_what_is_kept_to_branch_alike() -> None:
    text = remat.plan(captured(top, "inductor"), 0).explain()
    assert "kept as branch values, which backward must not round otherwise: 64 B of topk" in text
    text = remat.plan(
        captured(lambda x, w: (x @ w).softmax(-1).amax(-1).sum(), "eager"), 0
    ).explain()
    assert "kept as values that backward compares with their maximum: 256 B of _softmax" in text


def test_the_least_bytes_are_explained() -> None:
    with pytest.raises(BudgetError, match="because backward must branch as forward did"):
        remat.plan(captured(top, "eager"), remat.Saved(1))


@pytest.mark.parametrize(
    ("program", "dtype", "expected"),
    [
        (top, torch.bfloat16, True),
        (top, torch.float32, False),
        (lambda x, w: (x @ w).softmax(-1).amax(-1).sum(), torch.float16, True),
        (dropped, torch.bfloat16, False),
        (rectified, torch.bfloat16, False),
        (leaky, torch.bfloat16, False),
        (pooled, torch.bfloat16, False),
        (of_inputs, torch.bfloat16, False),
    ],
)
def test_graphs_that_branch_on_16_bits(
    program: Program, dtype: torch.dtype, expected: bool
) -> None:
    joint = captured(program, "inductor", dtype)
    index = index_graph(joint.graph)
    assert bool(branches_on_16_bits(index, classify(joint, index))) is expected
