"""Which half each node belongs to, how far from backward it is, and what memory it looks at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import remat
from remat.graph.joint import Role
from remat.graph.memory.ownership import Storages
from remat.graph.roles import UNREACHABLE, has_tangents
from remat.passes.core.state import Distances, State
from tests.graphs import joint_of, traced, weight


def names(state: State, flags: tuple[bool, ...]) -> list[str]:
    return [n.name for n, flag in zip(state.index.nodes, flags, strict=True) if flag]


@pytest.fixture(scope="module")
def state() -> State:
    return State(
        joint=joint_of(lambda x, w: torch.mm(x.cos(), w).sum(), weight(4, 4), weight(4, 4))
    )


def test_roles(state: State) -> None:
    roles = {state.index.nodes[i].name: r for i, r in state.roles.placeholders.items()}
    assert roles == {
        "primals_1": Role.PRIMAL,
        "primals_2": Role.PRIMAL,
        "tangents_1": Role.TANGENT,
    }
    forward = ["primals_1", "primals_2", "cos", "mm", "sum_1"]
    closure = ["tangents_1", "expand", "mm_1", "mm_2", "mul"]
    assert names(state, state.roles.required_forward) == forward
    assert names(state, state.roles.tangent_closure) == closure
    assert names(state, state.roles.required_backward) == closure
    unclaimed = [n.name for i, n in enumerate(state.index.nodes) if state.roles.unclaimed(i)]
    assert unclaimed == ["t", "t_1", "sin", "neg"]
    assert [state.index.nodes[i].name for i in range(len(state.index))
            if state.roles.forward_order[i] >= 0] == forward  # fmt: skip
    assert sorted(o for o in state.roles.forward_order if o >= 0) == list(range(len(forward)))


def test_distance_from_backward(state: State) -> None:
    distance = dict(zip((n.name for n in state.index.nodes), state.get(Distances()), strict=True))
    assert {k: v for k, v in distance.items() if v} == {
        "primals_1": 1,  # read by sin, which forward does not require
        "primals_2": 1,
        "cos": 1,
        "mm": UNREACHABLE,
        "sum_1": UNREACHABLE,
    }


def test_distance_counts_edges() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).neg().exp().sum()  # only the result of exp is read in backward

    state = State(joint=joint_of(f, weight(4)))
    distance = dict(zip((n.name for n in state.index.nodes), state.get(Distances()), strict=True))
    assert [distance[n] for n in ("exp", "neg", "add", "primals_1")] == [1, 2, 3, 4]


def test_a_draw_that_nobody_reads_is_required_by_forward() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x.sin()

    joint = traced(f, torch.randn(3))
    state = State(joint=joint)
    assert "rand" in names(state, state.roles.required_forward)


# Dynamo instantiates the function while it traces it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_backward_of_a_constant_gradient_is_required() -> None:
    """A gradient that depends on no tangent is required by backward, without being in its closure."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.cos(ctx.saved_tensors[0])

    state = State(joint=joint_of(lambda x: Constant.apply(x), weight(4)))
    cos = next(i for i, n in enumerate(state.index.nodes) if n.name.startswith("cos"))
    assert state.roles.required_backward[cos]
    assert not state.roles.tangent_closure[cos]


def test_has_tangents() -> None:
    assert has_tangents(joint_of(lambda x: x.sin(), weight(3)))
    assert not has_tangents(traced(lambda x: x.sin(), torch.randn(3)))


# Storages -----------------------------------------------------------------------------------------


def owners(state: State) -> dict[str, str]:
    storages = state.storages
    nodes = state.index.nodes
    return {n.name: nodes[storages.owner[i]].name for i, n in enumerate(nodes)}


def of(state: State, name: str) -> tuple[int, bool]:
    """Bytes, and whether the memory is alive anyway."""
    storages: Storages = state.storages
    i = state.index.by_name[name]
    return storages.nbytes[i], storages.alive[i]


def test_views_are_free_and_their_base_counts_whole() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        a, b = h.split(2, 1)
        return (a[:1].exp() * b[1:].exp()).sum()

    state = State(joint=joint_of(f, weight(4, 4), weight(4, 4)))
    owner = owners(state)
    views = [n for n in owner if n.startswith(("getitem", "slice")) and "backward" not in n]
    assert len(views) == 4
    assert {owner[v] for v in views} == {"mm"}
    assert {of(state, v)[0] for v in views} == {0}
    assert of(state, "mm") == (64, False)


def test_what_is_alive_anyway() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x @ w
        y = h.tanh()
        return y, y.view(-1).sin(), h.exp().sum()

    joint = joint_of(f, torch.randn(4, 4), weight(4, 4))
    state = State(joint=joint)
    assert of(state, "primals_1") == (64, True)
    assert of(state, "primals_2") == (64, True)
    assert of(state, "tanh") == (64, True), "it is an output"
    assert of(state, "mm") == (64, False)
    assert of(state, "exp") == (64, False)
    counted = State(joint=joint, count_outputs=True)
    assert of(counted, "tanh") == (64, False)
    assert of(counted, "primals_1") == (64, True)


def test_a_mutated_input_is_not_alive() -> None:
    def f(x: torch.Tensor, buf: torch.Tensor) -> torch.Tensor:
        y = (torch.sin(buf @ buf) @ x).sum()
        buf.add_(1)
        return y

    joint = joint_of(f, weight(4, 4), torch.randn(4, 4))
    state = State(joint=joint)
    mutated = {state.index.nodes[i].name for i in state.storages.mutated}
    assert len(mutated) == 1
    (name,) = mutated
    assert not of(state, name)[1]
    # Backward of `sin(buf @ buf) @ x` needs the sine, which may not be recomputed from buf.
    for budget in (0, 1):
        plan = remat.plan(joint, budget, "greedy")
        assert name not in plan.saved
        assert "sin" in plan.saved or plan.snapshots == (name,)


def test_elements_of_a_multi_output_operator_are_separate() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5, training=True).sum()

    state = State(joint=joint_of(f, weight(64, 64)))
    nbytes = {n: of(state, n)[0] for n in ("getitem", "getitem_1")}
    assert nbytes == {"getitem": 4 * 64 * 64, "getitem_1": 64 * 64}


def test_passes_report_roles_and_distances(state: State) -> None:
    done = remat.PassManager.parse("classify,dist-from-backward").run(state)
    assert not done.modified
    assert done.statistics == {"forward": 5, "backward": 5, "unclaimed": 4, "largest-distance": 1}
