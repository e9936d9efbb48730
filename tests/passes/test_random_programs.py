"""Random programs in, the same outputs and gradients out, through `remat.capture` and `torch.compile`.

Programs of every kind, and pipelines of every kind, are in ``tests/fuzz``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remat
from remat.graph.joint import Role, role_of
from tests.passes.programs import SIZE, Model, Program, captured, programs
from tests.steps import differences, run_graphs

BUDGETS = st.one_of(st.floats(0, 1, width=16), st.sampled_from([0, 1]))


def values_like(joint: remat.JointGraph, role: Role, seed: int) -> list[torch.Tensor]:
    """Real tensors in the shapes of a joint graph's placeholders."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for node in joint.graph.nodes:
        if node.op == "placeholder" and role_of(node) is role:
            fake = node.meta["val"]
            real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            found.append(real.normal_(generator=generator))
    return found


def halves(joint: remat.JointGraph, plan: remat.Plan) -> dict[str, torch.Tensor]:
    inputs = values_like(joint, Role.PRIMAL, 1)
    tangents = values_like(joint, Role.TANGENT, 2)
    return run_graphs(joint, plan.forward, plan.backward, inputs, tangents)[0]


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(), budgets=st.lists(BUDGETS, min_size=2, max_size=3), data=st.data())
def test_the_budget_changes_nothing(
    program: Program, budgets: list[float], data: st.DataObject
) -> None:
    joint = captured(program)
    before = joint.fingerprint
    reference = halves(joint, remat.plan(joint, 1))
    for budget in budgets:
        solver = data.draw(st.sampled_from(["greedy", "dp", "milp"]))
        cost = data.draw(st.sampled_from(["roofline", "flops", "unit"]))
        plan = remat.plan(joint, budget, solver, cost)
        assert plan.saved_bytes <= plan.capacity
        assert 0 <= plan.recompute_bound <= plan.recompute_cost
        assert differences(halves(joint, plan), reference) == []
    assert joint.fingerprint == before


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(max_lines=8))
def test_compiled_programs_do_what_they_do_without_us(program: Program) -> None:
    """Without us means ``aot_eager``: Dynamo drops draws that nobody reads, eager makes them."""

    def step(**how: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Model(program), torch.randn(SIZE, SIZE)
        f = torch.compile(model, **how)
        torch.manual_seed(5)
        loss, outputs = f(x)
        loss = loss + sum(o.sum() for o in outputs if o.requires_grad)
        loss.backward()
        assert model.u.grad is not None
        assert model.v.grad is not None
        left = [loss, *outputs, model.u.grad, model.v.grad, model.buf, torch.get_rng_state()]
        return [t.detach() for t in left]

    options = {"budget": 0, "lower": "eager", "solver": "greedy"}
    mine, theirs = step(backend="remat", options=options), step(backend="aot_eager")
    named = [{str(i): t for i, t in enumerate(side)} for side in (mine, theirs)]
    assert differences(named[0], named[1]) == []


@pytest.mark.parametrize("name", ["dropout", "noise", "mutate"])
def test_programs_hold_what_could_go_wrong(name: str) -> None:
    """The tests above are only worth something if the drawn programs hold these."""
    seen = 0

    @settings(max_examples=100, database=None, derandomize=True)
    @given(program=programs())
    def look(program: Program) -> None:
        nonlocal seen
        seen += any(line[0] == name for line in program.lines)

    look()
    assert seen >= 15
