"""What fuzzing has found, each as the least program that shows it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import remat
from tests.graphs import joint_of, node, weight
from tests.steps import memories


def test_memory_that_nobody_has_written_may_be_read_in_a_region() -> None:
    """Its tag for recomputation gives way: read again, it holds something else."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: F.rrelu(y, training=True).sin(), x, use_reentrant=False).sum()

    joint = joint_of(f, weight(40, 40))
    (made,) = (n.name for n in joint.graph.nodes if n.name.startswith("empty"))
    for budget in (0, 0.5, 1):
        plan = remat.plan(joint, budget, "lagrangian")
        assert made in plan.saved
        assert made not in plan.recomputed


def test_elements_of_a_list_of_views_may_be_tagged() -> None:
    """What must be saved is the memory that they look at; taking it apart again is free."""

    def f(x: torch.Tensor) -> torch.Tensor:
        one, two = (x @ x).unbind(0)
        return (one.sin() * two.cos()).sum()

    joint = joint_of(f, weight(2, 2))
    for n in joint.graph.nodes:
        if n.op == "call_function" and n.name.startswith(("mm", "unbind", "getitem")):
            n.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    plan = remat.plan(joint, 0)
    assert {"mm"} == set(plan.saved) - {"primals_1"}
    assert plan.saved_bytes == 16


def test_a_view_must_be_saved_though_its_memory_must_be_recomputed() -> None:
    """Both tags hold: backward gets the view, and runs the product again where it reads that."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y @ (y @ w)).sum()

    joint = joint_of(f, weight(2, 30, 30), weight(30, 30))
    node(joint, "mm").meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node(joint, "_unsafe_view").meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for pipeline in ("solve-graph(solver=lagrangian,budget=0)", "min-cut"):
        plan = remat.plan(joint, pipeline=f"{pipeline},partition")
        assert "_unsafe_view" in {*plan.saved}
        assert "_unsafe_view" not in plan.recomputed


@pytest.mark.parametrize("name", ["select", "slice", "diagonal", "as_strided"])
def test_a_scatter_into_a_view_holds_all_the_memory_behind_the_view(name: str) -> None:
    """PyTorch's kernel copies it whole; its fake kernel does not know that."""
    where: dict[str, tuple[int | list[int], ...]] = {
        "select": (0, 0),
        "slice": (0, 0, 4),
        "diagonal": (),
        "as_strided": ([8], [1], 8),
    }
    into = {"select": (0,), "slice": slice(4), "diagonal": 0, "as_strided": 0}[name]
    scatter = getattr(torch, f"{name}_scatter")

    def f(x: torch.Tensor) -> torch.Tensor:
        view = (x @ x)[8:16, :8]
        return (scatter(view, view[into].sin(), *where[name]) @ view).sin().sum()

    x = weight(40, 40)
    if name == "as_strided":
        try:
            f(x)
        except RuntimeError:
            pytest.skip("this PyTorch scatters with as_strided into contiguous tensors alone")
    plan = remat.plan(joint_of(f, x), 1)
    assert f"{name}_scatter" in plan.saved
    with torch.no_grad():
        _, *handed = plan.forward(x)
    kept = {k: nbytes for k, nbytes in memories(handed).items() if k not in memories([x])}
    assert sum(kept.values()) == plan.saved_bytes
