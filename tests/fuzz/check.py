"""What must hold of every program under every pipeline."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._functorch.partitioners import min_cut_rematerialization_partition

import remat
from remat.errors import PlanError
from remat.graph.roles import has_tangents
from remat.graph.text import parse_joint, print_joint
from remat.graph.verify import Split, verify
from remat.passes.core.state import PassResult, State
from remat.passes.instruments import VerifyEach
from tests.fuzz.captured import run_graphs, run_joint, run_through
from tests.fuzz.cases import Case, Region
from tests.fuzz.functions import plainly
from tests.fuzz.program import run_step
from tests.steps import Recorded, differences

#: What has been seen, for statistics.
SEEN: Counter[str] = Counter()


def check(case: Case) -> None:
    """Everything that must hold of a case."""
    captured = capture(case)
    if captured is None:
        return
    if captured.joint is None:
        SEEN["nothing to differentiate"] += 1
        return
    if not captured.tangents and has_tangents(captured.joint):
        SEEN["backward never ran"] += 1  # all that is differentiated is memory that nobody reads
        return
    SEEN["programs"] += 1
    joint, reference = captured.joint, run_joint(captured.joint, captured)
    check_step(case, captured, reference)
    before = joint.fingerprint
    for manager in case.pipelines:
        result = manager.run(State(joint=joint, count_outputs=case.count_outputs))
        check_result(result, captured, reference)
    check_plan(case, captured, reference)
    check_offloading(case, captured, reference)
    check_same_pipeline(joint, manager, result)
    check_same_graph(joint, manager, result)
    check_without_replay(case, captured, reference)
    check_tagged(case, captured, reference)
    assert joint.fingerprint == before, "the caller's graph has changed"


def capture(case: Case) -> Recorded | None:
    """Runs the compiled step, unless PyTorch refuses the program whoever partitions it."""
    try:
        return run_through(case.program, case.way, lambda joint: halves(case.compiled.run(joint)))
    except Unsupported:
        SEEN["refused by Dynamo"] += 1
    except Exception as error:
        refused = ("is tagged MUST_RECOMPUTE, but remat_fuzz::", "returns a branch value")
        if any(words in str(error) for words in refused):
            SEEN["refused by name: may not run again"] += 1
        elif is_refused_by_pytorch(case, error):
            SEEN["refused by PyTorch"] += 1
        else:
            raise
    return None


def is_refused_by_pytorch(case: Case, error: Exception) -> bool:
    """Whether PyTorch's own partitioner ends in the same error."""
    try:
        run_through(case.program, case.way, pytorch_halves)
    except Exception as other:
        return type(other) is type(error) and str(other) == str(error)
    return False


def pytorch_halves(joint: remat.JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The halves that PyTorch's own partitioner makes."""
    return min_cut_rematerialization_partition(
        joint.graph_module, (), num_fwd_outputs=joint.num_fwd_outputs
    )


def check_step(case: Case, captured: Recorded, reference: dict[str, torch.Tensor]) -> None:
    """The compiled step leaves behind what eager PyTorch does."""
    weights, args = case.program.tensors()
    eager = run_step(case.program.function(plainly), weights, args)
    if not torch.equal(eager["calls"], reference["calls"]):
        SEEN["unread calls dropped by AOTAutograd"] += 1
        return
    torch.manual_seed(5)
    draws = not torch.equal(eager["random state"], torch.get_rng_state())
    if case.way.decompose or (case.way.dynamo and draws):
        return  # Decompositions round differently, and Dynamo drops draws that nobody reads.
    found = differences(captured.left, eager)
    SEEN["as eager, to the bit"] += not found
    # AOTAutograd sums gradients in another order than eager where an input is given twice.
    far = [k for k in found if not near(captured.left[k], eager[k])]
    if far and not differences(
        captured.left, run_through(case.program, case.way, pytorch_halves).left
    ):
        SEEN["PyTorch differs from eager"] += 1
        return
    assert far == [], f"the compiled step differs from eager under {case.compiled}"


def check_plan(case: Case, captured: Recorded, reference: dict[str, torch.Tensor]) -> None:
    """The default pipeline, and the figures of its plan."""
    assert captured.joint is not None
    plan = remat.plan(captured.joint, *case.plan, count_outputs=case.count_outputs)
    if case.in_bytes:
        plan = plan_in_bytes(case, captured.joint, plan)
    left, kept = run_graphs(captured.joint, plan.forward, plan.backward, captured)
    assert differences(left, reference) == [], "the plan differs from the joint graph"
    assert 0 <= plan.recompute_bound <= plan.recompute_cost
    assert plan.least_bytes <= plan.saved_bytes <= plan.capacity
    again = remat.plan(captured.joint, plan=remat.Plan.from_json(plan.to_json()))
    assert (again.saved, again.peak_bytes) == (plan.saved, plan.peak_bytes)
    if case.count_outputs or case.way.dynamic:
        return
    kinds = {n.target for n in captured.joint.graph.nodes if n.name in plan.saved}
    if (
        torch.ops.aten.uniform.default in kinds
    ):  # where it reads a view, fake strides are not the real ones
        SEEN["uniform numbers kept in other strides than PyTorch's fake ones"] += (
            kept != plan.saved_bytes
        )
        return
    assert kept == plan.saved_bytes


def plan_in_bytes(case: Case, joint: remat.JointGraph, first: remat.Plan) -> remat.Plan:
    """The plan within the bytes that the first one takes, which the same solver can hold."""
    on_peak = isinstance(case.plan[0], remat.Peak)
    limit = first.peak_bytes if on_peak else first.saved_bytes
    if on_peak and limit <= 1:
        return first  # One byte would be read as a ratio.
    budget = remat.Peak(limit) if on_peak else remat.Saved(limit)
    plan = remat.plan(joint, budget, *case.plan[1:], count_outputs=case.count_outputs)
    SEEN[f"plans in bytes of {'the peak' if on_peak else 'what is saved'}"] += 1
    assert (plan.peak_bytes if on_peak else plan.saved_bytes) <= limit
    return plan


def check_offloading(case: Case, captured: Recorded, reference: dict[str, torch.Tensor]) -> None:
    """What goes to the host's memory comes back as it was, in time that pays, and as the saved plan says."""
    joint, budget = captured.joint, case.plan[0]
    assert joint is not None
    if case.way.dynamic:
        return  # where sizes are symbols, nothing is offloaded
    share = budget if isinstance(budget, remat.Peak) else remat.Peak(0.3)
    timed = {"cost": "roofline:h100", "count_outputs": case.count_outputs}
    without = remat.plan(joint, share, **timed)
    plan = remat.plan(joint, share, offload="20000GB/s", **timed)
    SEEN["plans"] += 1
    SEEN["plans that offload"] += bool(plan.offloads)
    left, _ = run_graphs(joint, plan.forward, plan.backward, captured)
    assert differences(left, reference) == [], "the plan that offloads differs from the joint graph"
    assert plan.recompute_cost + plan.exposed_time <= without.recompute_cost
    assert plan.peak_bytes <= max(plan.peak_limit, without.peak_bytes)
    again = remat.plan(joint, plan=remat.Plan.from_json(plan.to_json()))
    assert (again.offloads, again.peak_bytes) == (plan.offloads, plan.peak_bytes)


def check_result(
    result: PassResult, captured: Recorded, reference: dict[str, torch.Tensor]
) -> None:
    """The verifier has nothing to say, and the halves do what the joint graph does."""
    SEEN["pipelines"] += 1
    capacity = verified(result)
    left, kept = run_graphs(result.joint, *halves(result), captured)
    assert differences(left, reference) == [], "the halves differ from the joint graph"
    if capacity is not None and not result.state.count_outputs:
        assert kept <= capacity


def check_same_pipeline(
    joint: remat.JointGraph, manager: remat.PassManager, first: PassResult
) -> None:
    """The pipeline that its text reads back to does the same."""
    again = remat.PassManager.parse(str(manager))
    assert again == manager
    second = again.run(State(joint=joint, count_outputs=first.state.count_outputs))
    assert second.state.decision == first.state.decision
    assert list(map(spelt, halves(second))) == list(map(spelt, halves(first)))


def check_same_graph(
    joint: remat.JointGraph, manager: remat.PassManager, first: PassResult
) -> None:
    """The graph that its text reads back to prints the same, and is planned the same."""
    text = print_joint(joint)
    again = parse_joint(text)
    assert print_joint(again) == text
    assert again.fingerprint == joint.fingerprint
    second = manager.run(State(joint=again, count_outputs=first.state.count_outputs))
    assert second.state.decision == first.state.decision


def check_without_replay(
    case: Case, captured: Recorded, reference: dict[str, torch.Tensor]
) -> None:
    """Whatever would draw twice is refused, and only that."""
    assert captured.joint is not None
    result = case.without_replay.run(captured.joint)
    try:
        verified(result)
    except PlanError as error:
        if "draws anew in backward" not in str(error):
            raise
        SEEN["refused without replay"] += 1
        result = remat.PassManager.parse("functionalize-rng").run(result.state)
    check_result(result, captured, reference)


def check_tagged(case: Case, captured: Recorded, reference: dict[str, torch.Tensor]) -> None:
    """Tags hold, change no number, or are refused by name because no plan can obey them."""
    assert captured.joint is not None
    joint = tagged(captured.joint, case.regions)
    try:
        result = case.pipelines[0].run(joint, instruments=[VerifyEach()])
    except PlanError as error:
        SEEN["conflicting tags"] += 1
        text = str(error)
        told = (
            "loosen a MUST_SAVE",
            "can neither be saved nor recomputed",
            "remat.declare_pure",
            "branch value",
        )
        assert any(words in text for words in told)
        return
    SEEN["tagged"] += 1
    check_result(result, captured, reference)


def tagged(joint: remat.JointGraph, regions: tuple[Region, ...]) -> remat.JointGraph:
    """The joint graph with tags on some of its operators."""
    copy = joint.copy()
    operators = [n for n in copy.graph.nodes if n.op == "call_function"]
    for k, region in enumerate(regions):
        for node in operators[region.start : region.start + region.length]:
            node.meta["recompute"] = region.policy
            node.meta["ac_graph_id"] = k
    return copy


def halves(result: PassResult) -> tuple[fx.GraphModule, fx.GraphModule]:
    assert result.forward is not None
    assert result.backward is not None
    return result.forward, result.backward


def verified(result: PassResult) -> int | None:
    """Asks the verifier, and returns the bytes that may be saved."""
    forward, backward = halves(result)
    limits = result.state.limits
    capacity = None if limits is None else limits.capacity
    verify(
        Split(
            joint=result.joint,
            forward=forward,
            backward=backward,
            capacity=capacity,
            count_outputs=result.state.count_outputs,
        )
    )
    return capacity


def spelt(module: fx.GraphModule) -> list[str]:
    """The nodes of a graph as text."""
    return [n.format_node() or str(n.args) for n in module.graph.nodes]


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    wide = torch.complex128 if a.is_complex() else torch.float64
    tolerance = 1e-4 if a.element_size() >= 4 else 5e-2
    return torch.allclose(a.to(wide), b.to(wide), rtol=tolerance, atol=tolerance, equal_nan=True)
