"""Graphs on random numbers: inputs, compared results, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import remat
from remat.errors import ProblemError
from remat.graph.text import parse_joint
from remat.running.differences import first_difference
from remat.running.trial import Trial
from tests.graphs import joint_of, weight

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def step(x: torch.Tensor, buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.dropout((x @ w).cos(), 0.5, training=True)
    buffer.add_(h.detach().sum(0))
    return (h[: x.shape[0] // 2] * torch.randn_like(buffer) * buffer).sum()


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def joint(request: pytest.FixtureRequest) -> remat.JointGraph:
    args = torch.randn(96, 64), torch.zeros(64), weight(64, 64)
    return joint_of(step, *args, dynamic=request.param)


def test_a_graph_runs_alike_each_time(joint: remat.JointGraph) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trial = Trial.of(joint)
    once, again = trial.run_joint(joint), trial.run_joint(joint)
    assert first_difference(once, again) is None
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left alone"
    assert [k for k in once if k.startswith("output")][:1] == ["output 0"]
    assert any(isinstance(v, torch.Tensor) and v.shape == (64, 64) for v in once.values())


def assert_halves_do_the_same(joint: remat.JointGraph) -> None:
    trial = Trial.of(joint)
    reference = trial.run_joint(joint)
    for budget in (0, 1):
        plan = remat.plan(joint, budget)
        halves = trial.run_graphs(plan.forward, plan.backward, joint.num_fwd_outputs)
        assert first_difference(reference, halves) is None


def test_halves_leave_behind_what_the_graph_does(joint: remat.JointGraph) -> None:
    assert_halves_do_the_same(joint)


def test_numbers_drawn_from_a_seed_of_inductor_are_the_same_again() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).cos() * torch.rand(64, 64) * torch.randint(1, 9, (64,))).sin().sum()

    torch._dynamo.reset()
    joint = remat.capture(f, (weight(64, 64), weight(64, 64)), lower="inductor")
    drawn = [str(n.target) for n in joint.graph.nodes if "inductor_rand" in str(n.target)]
    assert drawn == ["prims.inductor_random.default", "prims.inductor_randint.default"]
    assert_halves_do_the_same(joint)


def test_halves_are_run_and_not_the_inputs_looked_at(joint: remat.JointGraph) -> None:
    trial, plan = Trial.of(joint), remat.plan(joint, 0)
    victim = next(
        n for n in plan.backward.graph.nodes if n.op == "call_function" and "mm" in n.name
    )
    victim.target = torch.ops.aten.mm.default
    victim.args = (victim.args[1], victim.args[0])
    try:
        halves = trial.run_graphs(plan.forward, plan.backward, joint.num_fwd_outputs)
    except RuntimeError:
        return  # an error about shapes reveals the mutation as well
    assert first_difference(trial.run_joint(joint), halves) is not None


def test_a_mutated_input_is_seen(joint: remat.JointGraph) -> None:
    trial = Trial.of(joint)
    left = trial.run_joint(joint)
    changed = [
        name
        for name, value in left.items()
        if name.startswith("input ")
        and isinstance(value, torch.Tensor)
        and not torch.equal(value, trial.inputs[name.split("'")[1]])
    ]
    assert len(changed) == 1, "the buffer"


def test_numbers_are_those_of_eager_pytorch() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ w).square().sum()

    joint = joint_of(f, weight(4, 8), weight(8, 4))
    trial = Trial.of(joint)
    left = trial.run_joint(joint)
    x, w = (trial.inputs[f"primals_{i}"].clone().requires_grad_() for i in (1, 2))
    out = f(x, w)
    grads = torch.autograd.grad(out, (x, w), trial.inputs["tangents_1"])
    torch.testing.assert_close(left["output 0"], out.detach())
    torch.testing.assert_close((left["gradient 0"], left["gradient 1"]), grads)


SHARED = '''joint("shared", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

primals_1: f32[4, 4] = primal()
primals_2: f32[4] @ primals_1 = primal()
tangents_1: f32[4, 4] = tangent()
add: f32[4, 4] = aten.add.Tensor(primals_1, primals_2)
return [
    forward(add),
    backward(tangents_1),
    backward(None),
]
'''  # fmt: skip


def test_what_shares_memory_still_does() -> None:
    joint = parse_joint(SHARED)
    inputs = Trial.of(joint).inputs
    one, other = inputs["primals_1"], inputs["primals_2"]
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert torch.equal(one.flatten()[:4], other)


TYPES = ("f32", "f16", "bf16", "f64", "i64", "i32", "u8", "b8", "c64", "f8e4m3fn")


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_has_numbers(dtype: str) -> None:
    text = SHARED.replace("f32[4] @ primals_1", f"{dtype}[4, 3](1, 4)").replace(
        "aten.add.Tensor(primals_1, primals_2)", "aten.sin.default(primals_1)"
    )
    value = Trial.of(parse_joint(text)).inputs["primals_2"]
    assert value.stride() == (1, 4)
    assert value.numel() == 12
    numbers = set(value.flatten().to(torch.complex64).tolist())
    assert numbers == {0, 1} if dtype in ("i64", "i32", "u8", "b8") else len(numbers) > 2
    left = Trial.of(parse_joint(text)).run_joint(parse_joint(text))
    assert first_difference(left, left) is None


# Refusing -----------------------------------------------------------------------------------------


def test_what_is_too_large_is_refused_before_anything_is_made() -> None:
    big = SHARED.replace("f32[4] @ primals_1", "f32[1000000000000]")
    with pytest.raises(
        ProblemError, match=r"the inputs take 3\.638 TiB; at most 1 GiB are allocated"
    ):
        Trial.of(parse_joint(big))
    with pytest.raises(ProblemError, match=r"at most 64 B are allocated"):
        Trial.of(parse_joint(SHARED), max_bytes=64)


def test_a_size_that_depends_on_data_is_refused() -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i.nonzero().squeeze(1)].sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        joint = joint_of(f, weight(8), torch.ones(8, dtype=torch.int64))
    with pytest.raises(ProblemError, match="has a size that depends on data"):
        Trial.of(joint)


def test_backward_that_reads_what_nobody_hands_over_is_refused(joint: remat.JointGraph) -> None:
    plan, trial = remat.plan(joint, 0), Trial.of(joint)
    graph = plan.backward.graph
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        extra = graph.placeholder("nobody")
        extra.meta = dict(first.meta)
    with pytest.raises(ProblemError, match="backward reads 'nobody', which forward does not hand"):
        trial.run_graphs(plan.forward, plan.backward, joint.num_fwd_outputs)


def test_uninitialised_memory_makes_no_difference() -> None:
    text = SHARED.replace(
        "aten.add.Tensor(primals_1, primals_2)",
        'aten.empty.memory_format([4, 4], device=torch.device("cpu"), pin_memory=False)',
    )
    joint = parse_joint(text)
    trial = Trial.of(joint)
    left = trial.run_joint(joint)
    assert left["output 0"].isnan().all()
    assert first_difference(left, trial.run_joint(joint)) is None
    assert not torch.are_deterministic_algorithms_enabled()
