"""Offloading on request: tags and policies hold, and the host's memory is bounded at every program point."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from remat.errors import BudgetError, PlanError
from remat.graph.memory.host_copies import OFFLOAD, RELOAD, host_bytes_of
from remat.graph.memory.storages import tensor_bytes
from remat.planning.search import offload_costs
from remat.planning.search.proposers import offloads
from tests import graphs
from tests.graphs import weight
from tests.model_types import make
from tests.planning.test_offloading import OPTIONS, Blocks, Torn, blocks, offloading, rows, torn
from tests.planning.test_policies import Net, region_of, saved_owners

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a .functools.lru_cache.:UserWarning"
    ),
]

MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
#: Of each architecture, the lowering, and the modules whose values go to the host.
ARCHITECTURES = {
    "llama": ("eager", "*.mlp"),
    "mixtral": ("inductor", "*.self_attn"),
}


def host_curve(plan: remat.Plan) -> list[int]:
    """Bytes in the host's memory at each operator of forward, then of backward, read off the graphs.

    A copy takes memory from the operator that begins it, and until backward has read it last.
    """
    curve, there = [], {}
    forward, backward = list(plan.forward.graph.nodes), list(plan.backward.graph.nodes)
    for node in forward:
        there |= {node.meta["packed_from"]: value_bytes(node)} if node.target is OFFLOAD else {}
        curve.append(sum(there.values()))
    copies = [n.args[0] for n in backward if n.target is RELOAD]
    assert len(copies) == len(set(copies)) == len(there)
    last = {n: max(map(backward.index, n.users)) for n in copies}
    curve += [sum(value_bytes(n) for n in copies if last[n] >= at) for at in range(len(backward))]
    return curve


def value_bytes(node: fx.Node) -> int:
    return tensor_bytes(node.meta["val"])


def kept_inside(plan: remat.Plan, pattern: str) -> list[str]:
    """Names of what a module makes that forward hands to backward on the device."""
    return [
        maker.name
        for maker in saved_owners(plan)
        if maker.target is not OFFLOAD
        and region_of(maker, pattern)
        and not maker.name.endswith("_state")  # of a generator, for its replay
    ]


@functools.cache
def captured(name: str) -> remat.JointGraph:
    torch._dynamo.reset()
    built = make(name)
    return remat.capture(built.model, (), built.same[0], lower=ARCHITECTURES[name][0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_policy_holds_at_every_moment_of_the_step(name: str) -> None:
    joint, pattern = captured(name), ARCHITECTURES[name][1]
    assert kept_inside(remat.plan(joint), pattern), "the policy changes something"
    plan = remat.plan(joint, 0.5, policies={pattern: "offload"})
    assert plan.offloads
    assert kept_inside(plan, pattern) == []
    assert max(host_curve(plan)) == plan.host_bytes
    with pytest.raises(BudgetError, match=f"raise it to {plan.host_bytes}, or tag fewer"):
        remat.plan(joint, 0.5, policies={pattern: "offload"}, host_memory=plan.host_bytes - 1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_should_go_to_the_host_does_as_far_as_there_is_room(name: str) -> None:
    joint = captured(name).copy()
    for node in joint.graph.nodes:
        if region_of(node, ARCHITECTURES[name][1]) and "tangents" not in str(node.args):
            node.meta["recompute"] = PREFER
    whole = remat.plan(joint, 1)
    assert whole.offloads
    room = whole.host_bytes * 2 // 3
    plan = remat.plan(joint, 1, host_memory=room)
    assert 0 < max(host_curve(plan)) == plan.host_bytes <= room
    assert set(plan.offloaded) < set(whole.offloaded)
    assert set(whole.offloaded) - set(plan.offloaded) <= set(plan.saved)
    assert "tagged for the host's memory is saved" in plan.explain()


def test_less_room_on_the_host_never_costs_less() -> None:
    least = offloading()
    costs = [least.recompute_cost + least.exposed_time]
    for room in (least.host_bytes, least.host_bytes // 2, 0):
        plan = remat.plan(blocks(), remat.Peak(0.2), host_memory=room, **OPTIONS)
        assert max(host_curve(plan)) == plan.host_bytes <= room
        assert plan.recompute_bound <= plan.recompute_cost + plan.exposed_time
        assert plan.peak_bytes <= plan.peak_limit
        costs.append(plan.recompute_cost + plan.exposed_time)
    assert costs[0] == costs[1] < costs[-1]
    assert costs[-1] == remat.plan(blocks(), remat.Peak(0.2), cost=OPTIONS["cost"]).recompute_cost


def test_the_bound_holds_through_every_door() -> None:
    joint, peak = blocks(depth=2), remat.Peak(0.2)
    room = remat.plan(joint, peak, **OPTIONS).host_bytes // 2
    options = {**OPTIONS, "host_memory": room}
    plan = remat.plan(joint, peak, **options)
    assert 0 < plan.host_bytes <= room
    assert "KiB in the host's memory at one time, over 10 GB/s" in plan.explain()
    found = remat.frontier(joint, by="peak", **options)
    assert 0 < max(found.plan(point).host_bytes for point in found.points) <= room
    row = remat.compare(joint, ["auto"], [peak], **options).rows[0]
    assert row.recompute_cost == plan.recompute_cost + plan.exposed_time
    model, lower = Blocks(depth=2), {"lower": "eager", **options}
    fit = remat.fit(model, rows, memory="1GiB", optimizer="sgd", batches=[8], **lower)
    assert f'"host_memory": {room}' in fit.code
    torch.compiler.reset()
    compiled = torch.compile(model, backend="remat", options={"budget": peak, **lower})
    compiled(rows()).backward()
    assert 0 < remat.plans()[-1].host_bytes <= room
    saved = remat.Plan.from_json(plan.to_json())
    assert remat.plan(joint, plan=saved, host_memory=room).host_bytes == plan.host_bytes
    with pytest.raises(BudgetError, match=r"host_memory is 1 B .* raise it to"):
        remat.plan(joint, plan=saved, host_memory=1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it behind a graph break
def test_graphs_of_one_step_share_the_host() -> None:
    policies = {"one.up.*": "offload", "two.up.*": "offload"}
    tagged = remat.plan(torn(), 1, policies=policies)
    assert all(plan.host_bytes for plan in tagged)
    room = tagged.host_bytes
    assert remat.plan(torn(), 1, policies=policies, host_memory=room).host_bytes == room
    with pytest.raises(BudgetError, match=f"raise it to {room}, or tag fewer"):
        remat.plan(torn(), 1, policies=policies, host_memory=room - 1)
    # Compiled one by one, the second graph brings them above the bound.
    torch.compiler.reset()
    options = {"lower": "eager", "policies": policies, "host_memory": room - 1}
    with pytest.raises(BudgetError, match=r"2 graphs of the step have .* plan them together"):
        torch.compile(Torn(), backend="remat", options=options)(rows(batch=64)).backward()


def test_graphs_of_one_step_share_the_host_where_offloading_is_searched() -> None:
    whole = remat.plan(torn(), remat.Peak(0.3), **OPTIONS)
    room = whole.host_bytes // 2
    assert room
    plans = remat.plan(torn(), remat.Peak(0.3), host_memory=room, **OPTIONS)
    assert sum(plan.host_bytes for plan in plans) <= room


# Tags -------------------------------------------------------------------------------------------------


def marked(tag: CheckpointPolicy, *ops: Any) -> Callable[..., torch.Tensor]:
    """A step whose operators of some kinds have a tag; the others of its region are recomputed."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return tag if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm((x @ w).sin().view(-1, 32), (32,)).exp() @ w

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x.cos(), w, context_fn=contexts, use_reentrant=False).sum()  # type: ignore[no-any-return]

    return f


@functools.cache
def joint_of(tag: CheckpointPolicy, *ops: Any) -> remat.JointGraph:
    return graphs.joint_of(marked(tag, *ops), weight(16, 32), weight(32, 32))


ATEN = torch.ops.aten


@pytest.mark.parametrize("budget", [0, 0.5, 1, "saved:1MiB", "peak:0.5", "peak:0"])
def test_tags_hold_at_every_budget(budget: Any) -> None:
    joint = joint_of(MUST, ATEN.sin.default, ATEN.native_layer_norm.default)
    plan = remat.plan(joint, budget)
    assert {"sin", "getitem", "getitem_1", "getitem_2"} <= set(plan.offloaded)
    assert plan.link == "pcie4 (32 GB/s)"
    again = remat.plan(joint, plan=plan.to_json())
    assert (again.offloads, again.peak_bytes) == (plan.offloads, plan.peak_bytes)


def test_saved_bytes_do_not_count_what_is_on_the_host() -> None:
    joint = joint_of(MUST, ATEN.sin.default, ATEN.native_layer_norm.default)
    least = remat.plan(joint, 0)
    assert least.host_bytes > least.saved_bytes
    asked = remat.Saved(least.saved_bytes)
    plan = remat.plan(joint, asked)
    assert plan.saved_bytes <= least.saved_bytes
    assert plan.host_bytes == least.host_bytes
    assert remat.plan(joint, plan=plan.to_json()).saved_bytes == plan.saved_bytes


def test_a_peak_counts_on_what_must_go_to_the_host() -> None:
    joint = blocks().copy()
    for node in joint.graph.nodes:
        if node.name.startswith("gelu") and "backward" not in node.name:
            node.meta["recompute"] = MUST
    on_device = joint.copy()
    for node in on_device.graph.nodes:
        if node.meta.get("recompute") is MUST:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    least = remat.plan(on_device, remat.Peak(0.0), cost="roofline:epyc").peak_bytes
    plan = remat.plan(joint, remat.Peak(least - 40_000), cost="roofline:epyc")
    assert plan.peak_bytes <= least - 40_000
    assert plan.offloaded
    assert all(name.startswith("gelu") for name in plan.offloaded)
    assert plan.recompute_bound <= plan.recompute_cost + plan.exposed_time
    with pytest.raises(BudgetError):
        remat.plan(on_device, remat.Peak(least - 40_000), cost="roofline:epyc")


def test_a_value_that_backward_does_not_read_needs_no_copy() -> None:
    plan = remat.plan(joint_of(MUST, ATEN.mm.default))
    assert "mm" in plan.offloaded
    assert "mm_1" not in (*plan.saved, *plan.offloaded)


@pytest.mark.parametrize(
    ("ops", "options", "why"),
    [
        ((ATEN.sin.default,), {"cost": "flops"}, r"copies take time, and cost model 'flops' counts"),
        ((ATEN.sin.default,), {"hooks": "bf16"}, r"hooks='bf16' pack every saved value"),
        ((ATEN.sin.default,), {"pipeline": "min-cut,partition"}, r"a pipeline, and a plan saved"),
    ],
)  # fmt: skip
def test_a_tag_that_cannot_hold_is_refused_with_its_reason(
    ops: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(PlanError, match=f"'sin' is tagged .* by MUST_CPU_OFFLOAD, .*: {why}"):
        remat.plan(joint_of(MUST, *ops), **options)
    assert not remat.plan(joint_of(PREFER, *ops), **options).offloads


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("view", "it is an input, which is alive throughout the step"),
        ("exp", "it shares the memory of an output of forward, which stays on the device"),
    ],
)
def test_an_input_and_an_output_cannot_go_to_the_host(name: str, why: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).sin().exp()

    joint = remat.capture(f, (torch.randn(8, 8, requires_grad=True),), lower="eager")
    next(n for n in joint.graph.nodes if n.name == name).meta["recompute"] = MUST
    with pytest.raises(PlanError, match=f"is tagged .* by MUST_CPU_OFFLOAD, .*: {why}"):
        remat.plan(joint, 1)


def test_a_policy_that_cannot_hold_names_itself() -> None:
    torch._dynamo.reset()
    joint = remat.capture(Net(), (torch.randn(16, 32),), lower="eager", dynamic=True)
    with pytest.raises(PlanError, match=r"by policy '\*\.mlp=offload', .*: its size is symbolic"):
        remat.plan(joint, policies={"*.mlp": "offload"})


def test_frontiers_offload_what_is_tagged() -> None:
    joint = joint_of(MUST, ATEN.sin.default)
    for by in ("saved", "peak"):
        found = remat.frontier(joint, by=by)
        for point in found.points:
            plan = found.plan(point)
            assert "sin" in plan.offloaded
            assert plan.peak_bytes == point.peak_bytes
            assert plan.recompute_cost + plan.exposed_time == point.recompute_cost
            assert by == "peak" or plan.saved_bytes == point.saved_bytes


@pytest.mark.parametrize(
    ("nbytes", "taken"), [(0, 0), (1, 1), (3, 4), (2**20, 2**20), (33 << 20, 64 << 20)]
)
def test_page_locked_buffers_are_powers_of_two(nbytes: int, taken: int) -> None:
    assert host_bytes_of(nbytes, pinned=True) == taken
    assert host_bytes_of(nbytes, pinned=False) == nbytes


@pytest.mark.parametrize("searched", [True, False], ids=["searched", "tagged"])
def test_the_hosts_memory_counts_page_locked_buffers(
    searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = captured("llama")
    asked: dict[str, Any] = {"budget": remat.Peak(0.3), "offload": "pcie5"}
    if not searched:
        asked = {"budget": 0.5, "policies": {"*.mlp": "offload"}}
    plain = remat.plan(joint, **asked)
    assert plain.host_bytes == sum(value.nbytes for value in plain.offloads) > 0
    for module in (offload_costs, offloads):  # as on a CUDA device
        monkeypatch.setattr(module, "is_pinned", lambda value: True)
    plan = remat.plan(joint, **asked)
    assert plan.host_bytes == sum(1 << (v.nbytes - 1).bit_length() for v in plan.offloads)
    assert plan.host_bytes > sum(value.nbytes for value in plan.offloads)
    assert remat.Plan.from_json(plan.to_json()).host_bytes == plan.host_bytes
    room = plan.host_bytes - 1
    if searched:
        assert remat.plan(joint, **asked, host_memory=room).host_bytes <= room
    else:
        with pytest.raises(BudgetError, match=f"raise it to {plan.host_bytes}, or tag fewer"):
            remat.plan(joint, **asked, host_memory=room)
