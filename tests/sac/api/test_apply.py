"""Plans applied to models: changed and unchanged attributes, refusals, and `torch.compile`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import PlanError, PolicyError, ProblemError
from remat.graph.joint import JointGraph
from remat.sac import SACPlan, apply, is_skipped, remove
from tests.graphs import joint_of
from tests.sac.planned import Block, Stack, all_equal, gradients, plan_for, plan_of, sac_plan

LAYERS = ("layers.0", "layers.1")
SHAPE = (4, 8)


@pytest.fixture(scope="module")
def plan() -> SACPlan:
    return plan_for(Stack, LAYERS, SHAPE)


@pytest.fixture
def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).view(SHAPE)


class Calls:
    """Count the runs of modules: a recomputed module runs twice."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_pre_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        self.count += 1


def test_the_same_gradients_from_the_same_parameters(model: Stack, plan: SACPlan) -> None:
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    wanted = gradients(model, inputs())
    inner, outer = Calls(model.layers[0].get_submodule("up")), Calls(model.layers[0])
    assert apply(model, plan) is model
    assert all_equal(gradients(model, inputs()), wanted)
    assert (inner.count, outer.count) == (2, 1), "hooks of the module itself are outside"
    assert [n for n, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert type(model.layers[0]) is Block


def test_noise_of_a_module_without_stored_results_is_written_again() -> None:
    """RReLU's noise is saved for backward before it is written; see `draws_into_argument`."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.RReLU()))
    wanted = gradients(model, inputs())
    ops = ("t", "addmm", "empty_like", "rrelu_with_noise")
    plain = plan_of(*(f"aten.{op}.default" for op in ops), name="0")
    assert all_equal(gradients(apply(model, sac_plan(plain)), inputs()), wanted)


def test_removing_leaves_no_trace(model: Stack, plan: SACPlan) -> None:
    inner = Calls(model.layers[0].get_submodule("up"))
    before = [dict(m.__dict__) for m in model.modules()]
    assert remove(apply(model, plan)) is model
    assert [dict(m.__dict__) for m in model.modules()] == before
    gradients(model, inputs())
    assert inner.count == 1
    apply(model, plan)


def test_a_forward_that_was_replaced_before_is_kept(model: Stack, plan: SACPlan) -> None:
    layer = model.layers[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return Block.forward(layer, x) * 1  # type: ignore[arg-type]

    layer.forward = forward
    apply(model, plan)
    with pytest.raises(PolicyError, match=r"module 'layers.0': .* operator 16 is aten.mul.Tensor"):
        model(inputs())
    remove(model)
    assert layer.forward is forward


def test_a_copy_runs_the_copys_modules(model: Stack, plan: SACPlan) -> None:
    wanted = gradients(model, inputs())
    apply(model, plan)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all_equal(gradients(other, inputs()), wanted)
    read = pickle.loads(pickle.dumps(other))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    inner = Calls(read.layers[0].up)
    assert all_equal(gradients(read, inputs()), wanted)
    assert inner.count == 2
    assert type(remove(read).layers[0].forward.__self__) is Block


def test_eval_mode_and_no_grad_run_as_before(model: Stack, plan: SACPlan) -> None:
    apply(model, plan).eval()
    inner = Calls(model.layers[0].get_submodule("up"))
    model(inputs()).sum().backward()
    assert inner.count == 1, "nothing is recomputed"
    model.train()
    with torch.no_grad():
        assert not model(inputs()).requires_grad


def test_what_stores_nothing_is_checkpointed_without_a_policy(model: Stack) -> None:
    bare = sac_plan(plan_of(name="layers.1"))  # a policy would refuse operators that the plan lacks
    wanted = gradients(model, inputs())
    inner = Calls(model.layers[1].get_submodule("up"))
    assert all_equal(gradients(apply(model, bare), inputs()), wanted)
    assert inner.count == 2
    with pytest.raises(PolicyError, match="the module runs other operators"):
        apply(remove(model), bare, [torch.ops.aten.mm.default], firm=False)(inputs())


@dataclass
class Output:
    hidden: torch.Tensor
    rest: tuple[torch.Tensor, None]


class Rich(nn.Module):
    """Module that takes keyword arguments and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, *, other: torch.Tensor | None = None) -> Output:
        assert other is not None
        return Output(self.block(x, scale=2.0) + other, (x.sin() * other, None))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rich = Rich()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: Output = self.rich(x, other=x * 2)
        return out.hidden + out.rest[0]


class Shared(nn.Module):
    """Module that calls one submodule twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sin())


class Half(Stack):
    """Module that runs under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize(
    ("make", "names"), [(Holder, ["rich"]), (Shared, ["first"]), (Half, LAYERS)]
)
def test_the_same_gradients_of_other_models(make: type[nn.Module], names: Sequence[str]) -> None:
    other = make()
    wanted = gradients(other, inputs())
    apply(other, plan_for(make, names, SHAPE))
    assert all_equal(gradients(other, inputs()), wanted)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.0"], r"'model.layers.0', which Stack does not have; near are 'layers.0'"),
        (["layer.0"], r"near are 'layers.0', 'layers.1'"),
        (["xyz"], "no name is near it"),
        (["layers.0", "layers.0.up"], "'layers.0.up' within module 'layers.0'; expected modules"),
        (["layers.0.up", "layers"], "'layers.0.up' within module 'layers'"),
        (["layers.0", ""], "'layers.0' within module ''"),
        (["layers.0", "layers.0"], "'layers.0' and 'layers.0' of the plan are the same"),
    ],
)
def test_plans_for_other_models_are_refused(model: Stack, names: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        apply(model, sac_plan(*(plan_of(name=name) for name in names)))
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_applying_twice_is_refused(model: Stack, plan: SACPlan) -> None:
    apply(model, plan)
    with pytest.raises(PlanError, match=r"'layers.0' follows a plan already: .*remove\(model\)"):
        apply(model, plan)
    apply(remove(model), sac_plan(plan_of(name="")))
    with pytest.raises(PlanError, match=r"the Stack follows a plan already: .*remove\(model\)"):
        apply(model, plan)


def test_what_is_no_model_or_plan_is_refused(model: Stack, plan: SACPlan) -> None:
    with pytest.raises(ProblemError, match=r"model is a SACPlan; expected a torch.nn.Module"):
        apply(plan, model)  # type: ignore[arg-type, type-var]
    with pytest.raises(ProblemError, match="expected a SACPlan, got ModulePlan"):
        apply(model, plan["layers.0"])  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="expected a policy or a list"):
        apply(model, plan, 7)  # type: ignore[arg-type]


def test_more_policies(model: Stack, plan: SACPlan) -> None:
    wanted = gradients(model, inputs())
    norm = torch.ops.aten.native_layer_norm.default
    apply(model, plan, [norm], firm=False)
    assert all_equal(gradients(model, inputs()), wanted)


def dry_model() -> Stack:
    """Return a model without dropout, which is one operator in a graph and several in eager code."""
    return Stack(blocks=1, p=0.0)


@pytest.fixture(scope="module")
def dry() -> SACPlan:
    return plan_for(dry_model, LAYERS[:1], SHAPE, share=0.5)


@pytest.fixture(scope="module")
def joint(dry: SACPlan) -> JointGraph:
    """Return the joint graph of a model to which a plan is applied."""
    return joint_of(apply(dry_model(), dry), inputs())


def test_tags_are_those_of_the_plan(dry: SACPlan, joint: JointGraph) -> None:
    told = {True: CheckpointPolicy.MUST_SAVE, False: CheckpointPolicy.MUST_RECOMPUTE}
    planned = [
        (name.replace("_.", "."), told[i in m.stored])  # a traced graph is functionalised
        for m in dry.modules
        for i, name in enumerate(m.ops)
    ]
    found = [
        (str(n.target), n.meta["recompute"])
        for n in joint.graph.nodes
        if n.meta.get("recompute") is not None
        and isinstance(n.target, torch._ops.OpOverload)
        and not is_skipped(n.target)
    ]
    assert found == planned
    assert {tag for _, tag in found} == set(told.values())


def test_our_partitioner_obeys(joint: JointGraph) -> None:
    untagged = joint_of(dry_model(), inputs())
    tags = {n.name: n.meta.get("recompute") for n in joint.graph.nodes}
    for budget in (0.0, 1.0):
        names = set(remat.plan(joint, budget=budget).saved)
        saved = {tags[n] for n in names}
        assert CheckpointPolicy.MUST_RECOMPUTE not in saved
        assert CheckpointPolicy.MUST_SAVE in saved
        # Without tags, the partitioner would decide otherwise.
        assert set(remat.plan(untagged, budget=budget).saved) != names


class Normed(nn.Module):
    """Module with batch norm, which writes to its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(True), nn.Dropout(0.3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_gradients_and_statistics_when_compiled() -> None:
    """Compare remat's backend and PyTorch's partitioner, under a plan, with the latter without a plan."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, plan = Normed(), plan_for(Normed, ["layer"], SHAPE, share=0.8)
    theirs: dict[str, Any] = {"backend": "aot_eager"}
    ours: dict[str, Any] = {"backend": "remat", "options": {"lower": "eager"}}
    wanted, *found = (
        gradients(torch.compile(run, **compiler, fullgraph=True), inputs())
        for run, compiler in (
            (copy.deepcopy(model), theirs),
            (apply(copy.deepcopy(model), plan), theirs),
            (apply(model, plan), ours),
        )
    )
    assert len(wanted) == 4 + 3
    for planned in found:
        torch.testing.assert_close(planned, wanted)


def test_a_plan_of_no_modules_is_applied_and_removed() -> None:
    from remat.checkpointing import estimate, plan

    model = Stack()
    tree = estimate(model, (inputs(),))
    empty = plan(tree, memory=2 * tree.peak_bytes(1))
    assert not empty.modules
    before = set(model.__dict__)
    assert remove(apply(model, empty)) is model
    assert set(model.__dict__) == before


def test_a_class_is_refused(plan: SACPlan) -> None:
    says = r"'Stack' is a class; pass an instance: Stack\(\)"
    calls = (
        lambda: apply(Stack, plan),  # type: ignore[type-var]
        lambda: remove(Stack),  # type: ignore[type-var]
        lambda: remat.checkpointing.plan(Stack, (inputs(),), memory=0.5),  # type: ignore[arg-type]
        lambda: remat.checkpointing.check(Stack, plan, (inputs(),)),  # type: ignore[arg-type]
    )
    for call in calls:
        with pytest.raises(remat.RematError, match=says):
            call()
