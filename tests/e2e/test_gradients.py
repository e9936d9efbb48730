"""Gradients never change: whatever is planned, a step leaves behind what it would have without us."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._functorch import config as functorch_config

import remat
from tests.e2e.doors import aot
from tests.models import ZOO, Outcome, Step, build
from tests.planning.test_host_memory import kept_inside
from tests.planning.test_policies import saved_inside
from tests.steps import Recorded, differences, recording_backend

#: All of them decide; what they decide runs by itself, which takes a tenth of compiling it.
BUDGETS = (0, 0.2, 0.5, 1)
#: Of those that resemble one another, one.
NAMES = tuple(name for name in ZOO if name not in ("llama", "bert", "vit"))
#: Compiled steps of the others run on plans that recompute in `test_policies` and `test_model_types`.
COMPILED = ("resnet", "randn_like", "checkpointed", "mutated_buffer")
#: A link so fast that small models gain by it.
LINK = {"offload": "2000GB/s", "cost": "roofline:h100"}


def at_full_budget(name: str) -> tuple[Recorded, Outcome]:
    """A step at budget 1, and what passed through its halves."""
    step, found = build(name), Recorded()
    f = torch.compile(step.model, backend=recording_backend(found, remat.partitioner(1)))
    return found, step.train(f)


def compiled(step: Step, lower: str = "eager", **options: object) -> Outcome:
    torch._dynamo.reset()
    before = len(remat.plans())
    outcome = step.train(
        torch.compile(step.model, backend="remat", options={"lower": lower, **options})
    )
    assert len(remat.plans()) > before, "the step did not run on a plan of ours"
    return outcome


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_has_something_to_lose(name: str) -> None:
    step = build(name)
    once, again = step.train(), step.train()
    assert once.differs_from(again) == []
    assert once.gradients
    assert all(g.isfinite().all() for g in once.gradients.values())
    assert any(g.abs().max() > 0 for g in once.gradients.values())
    if name in ("gpt2", "bert", "t5", "vit", "randn_like", "checkpointed"):
        assert "loss" in step.train(seed=8).differs_from(once), "nothing in this model is random"
    if name in ("resnet", "mutated_buffer"):
        assert any(
            not torch.equal(b, step.initial[k])
            for k, b in once.buffers.items()
            if k in step.initial
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_same_at_every_budget(name: str) -> None:
    """Small models with every solver, large ones with the default."""
    step, full = at_full_budget(name)
    eager = build(name).train()
    assert full.gradient_distance(eager) <= 1e-5
    torch.testing.assert_close(full.buffers, eager.buffers)
    if name in COMPILED:
        assert compiled(build(name), budget=0).differs_from(full) == []
    assert step.joint is not None
    reference = step.run(remat.plan(step.joint, 1))
    solvers = ("auto",) if name in ("gpt2", "t5", "resnet") else remat.solver_names()
    changed = {
        label: different
        for label, plan in plans_of_all(step.joint, solvers).items()
        if (different := differences(step.run(plan), reference))
    }
    assert changed == {}


def plans_of_all(joint: remat.JointGraph, solvers: Sequence[str]) -> dict[str, remat.Plan]:
    """The distinct decisions of solvers, by who made each first.

    At half of the memory and at all of it they differ most; the default decides at every budget.
    """
    plans: dict[object, tuple[str, remat.Plan]] = {}
    for solver in solvers:
        for budget in BUDGETS if solver == "auto" else (0.5, 1):
            plan = remat.plan(joint, budget, solver)
            assert plan.saved_bytes <= plan.capacity
            plans.setdefault(plan.decision, (f"{solver} at {budget}", plan))
    assert len(plans) > 1, "the budget decides nothing on this model"
    return dict(plans.values())


def test_the_halves_are_the_same_with_values_offloaded() -> None:
    step, _ = at_full_budget("mutated_buffer")
    assert step.joint is not None
    plan = remat.plan(step.joint, remat.Peak(0.0), **LINK)  # type: ignore[arg-type]
    assert plan.host_bytes
    assert differences(step.run(plan), step.run(remat.plan(step.joint, 1))) == []


def shallow(name: str) -> Step:
    """A model of the zoo with one layer: Inductor compiles each of them."""
    step = build(name)
    inside, layers = {"gpt2": ("transformer", "h"), "checkpointed": ("", "blocks")}[name]
    owner = step.model.get_submodule(inside)
    setattr(owner, layers, getattr(owner, layers)[:1])
    return dataclasses.replace(step)


def test_gradients_under_inductor() -> None:
    """With dropout; one module is recomputed whole, and another goes to the host."""
    plain = shallow("gpt2").train()
    policies = {"*.attn": "recompute", "*.mlp": "offload"}
    options: dict[str, Any] = {"budget": 0.05, "policies": policies, "fallback_random": True}
    outcome = compiled(shallow("gpt2"), "inductor", **options)
    assert outcome.gradient_distance(plain) <= 1e-5
    assert torch.equal(outcome.random_state, plain.random_state)
    plan = remat.plans()[-1]
    assert plan.host_bytes
    assert kept_inside(plan, "*.mlp") == []
    assert saved_inside(plan, "*.attn") == []


@pytest.mark.vectorised  # what users run
def test_inductors_own_random_numbers_do_not_change() -> None:
    """Without ``fallback_random`` the numbers are not eager's, but the same at every budget."""
    full, least = (compiled(shallow("checkpointed"), "inductor", budget=b) for b in (1, 0))
    assert least.gradient_distance(full) <= 1e-4
    assert torch.equal(least.random_state, full.random_state)
    plain = shallow("checkpointed").train()
    assert full.gradient_distance(plain) > 1e-3, "these are eager's numbers"


def test_pytorch_own_partitioner_is_caught() -> None:
    """What these tests look for is really there to be found: PyTorch 2.13 draws anew in backward."""
    step = build("randn_like")
    with functorch_config.patch(activation_memory_budget=0.5, activation_memory_budget_solver="dp"):
        outcome = step.train(
            torch.compile(step.model, backend=aot(min_cut_rematerialization_partition))
        )
    assert outcome.gradient_distance(build("randn_like").train()) > 1e-3
