"""The doors into torch.compile: what users switch on around a model works as it does without us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config

import remat
from benchmarks.models import build

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

Model = Callable[..., Any]


class Mlp(nn.Module):
    """Products, dropout and a pointwise tail, wide enough that budgets below 1 decide something."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)) * torch.sigmoid(x))
        return x


@pytest.fixture
def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp().train()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(128, 64)


def compiled(model: Model, budget: float | int | str = 0.0, **options: Any) -> Model:
    options = {"budget": budget, "lower": "eager", **options}
    return torch.compile(model, backend="remat", options=options)  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def run(model: nn.Module, step: Callable[[], Any], seed: int = 3) -> list[Any]:
    """Runs a step from a seed; returns gradients, generator state, and what the step returned."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    returned = step()
    return [*gradients(model), torch.get_rng_state(), *torch.utils._pytree.tree_leaves(returned)]


def assert_same(mine: list[Any], theirs: list[Any]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
        else:
            assert a == b


@pytest.fixture
def new_plans() -> Callable[[], tuple[remat.Plan, ...]]:
    """The plans made since the test started."""
    before = len(remat.plans())
    return lambda: remat.plans()[before:]


NewPlans = Callable[[], tuple[remat.Plan, ...]]


# What users switch on -----------------------------------------------------------------------------


def test_autocast(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                loss = f(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    reference = run(mlp, stepper(mlp))
    at = {}
    for budget in (1, 0.5, 0):
        torch._dynamo.reset()
        at[budget] = run(mlp, stepper(compiled(mlp, budget)))
        assert_same(at[budget], at[1])
    assert len(new_plans()) == 3
    assert new_plans()[-1].recomputed
    for mine, theirs in zip(at[0], reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)


def test_no_grad_and_frozen_models_are_not_planned(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    f = compiled(mlp)
    with torch.no_grad():
        assert_same(run(mlp, lambda: f(x)), run(mlp, lambda: mlp(x)))
    mlp.requires_grad_(False)
    assert_same(run(mlp, lambda: f(x)), run(mlp, lambda: mlp(x)))
    mlp.eval()
    assert_same(run(mlp, lambda: f(x)), run(mlp, lambda: mlp(x)))
    assert new_plans() == ()


def test_eval_with_gradients_is_planned_without_dropout(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    mlp.eval()
    f = compiled(mlp)
    assert_same(run(mlp, lambda: f(x).sum().backward()), run(mlp, lambda: mlp(x).sum().backward()))
    (plan,) = new_plans()
    assert not any("dropout" in name for name in plan.recomputed)


def test_gradients_accumulate_over_steps(mlp: Mlp, x: torch.Tensor) -> None:
    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> None:
            for k in (1, 2):
                (f(x * k).square().mean() / 2).backward()

        return step

    assert_same(run(mlp, stepper(compiled(mlp))), run(mlp, stepper(mlp)))


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_backward_twice_through_one_forward(mlp: Mlp, x: torch.Tensor, budget: float) -> None:
    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> Any:
            loss = f(x).square().mean()
            loss.backward(retain_graph=True)
            once = [g for g in gradients(mlp) if g is not None]
            loss.backward()
            return once

        return step

    assert_same(run(mlp, stepper(compiled(mlp, budget))), run(mlp, stepper(mlp)))


def test_two_losses_backward_one_after_the_other() -> None:
    class Two(Mlp):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            h = super().forward(x)
            return h.square().mean(), torch.sin(h).sum(-1)

    torch.manual_seed(0)
    model, x = Two().train(), torch.randn(128, 64)

    def stepper(f: Model, which: str) -> Callable[[], Any]:
        def step() -> None:
            first, second = f(x)
            if which == "sum":
                (first + 2 * second.mean()).backward()
            elif which == "one":
                second.sum().backward()
            else:
                first.backward(retain_graph=True)
                second.sum().backward()

        return step

    for which in ("sum", "one", "in turn"):
        torch._dynamo.reset()
        f = compiled(model)
        assert_same(run(model, stepper(f, which)), run(model, stepper(model, which)))


@dataclass
class Answer:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    a: torch.Tensor
    b: list[torch.Tensor | int | None]


@pytest.mark.parametrize("shape", ["dict", "dataclass", "nested"])
def test_outputs_of_any_shape(shape: str, x: torch.Tensor) -> None:
    class Shaped(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            h = super().forward(x)
            if shape == "dict":
                return {"h": h, "view": h[:2].T, "input": x, "n": 3}
            if shape == "dataclass":
                return Answer(hidden=h, extra={"mean": h.mean(), "none": None})
            return Pair(h, [h.detach() * 2, 7, None, (h + 1).sum(0)]), {"deep": [(h.cos(),)]}

    torch.manual_seed(0)
    model = Shaped().train()

    def flat(out: Any) -> list[Any]:
        if isinstance(out, Answer):
            out = (out.hidden, out.extra)
        return torch.utils._pytree.tree_leaves(out)

    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> Any:
            leaves = flat(f(x))
            tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
            torch.stack([v.sum() for v in tensors if v.requires_grad]).sum().backward()
            return [v.detach() if isinstance(v, torch.Tensor) else v for v in leaves]

        return step

    assert_same(run(model, stepper(compiled(model))), run(model, stepper(model)))
    with torch.no_grad():
        assert type(compiled(model)(x)) is type(model(x))


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_dynamic_shapes(mlp: Mlp, budget: float, new_plans: NewPlans) -> None:
    f = torch.compile(
        mlp, backend="remat", options={"budget": budget, "lower": "eager"}, dynamic=True
    )

    def stepper(f: Model, x: torch.Tensor) -> Callable[[], Any]:
        def step() -> Any:
            loss = f(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    for rows in (128, 96, 33):
        x = torch.randn(rows, 64)
        assert_same(run(mlp, stepper(f, x)), run(mlp, stepper(mlp, x)))
    assert len(new_plans()) == 1, "one plan serves all sizes"


# Dynamo looks at .grad of what crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_graph_breaks_give_a_plan_for_each_graph(x: torch.Tensor, new_plans: NewPlans) -> None:
    class Broken(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    model = Broken().train()
    f = compiled(model)
    assert_same(
        run(model, lambda: f(x).square().mean().backward()),
        run(model, lambda: model(x).square().mean().backward()),
    )
    assert len(new_plans()) >= 2
    assert len({p.fingerprint for p in new_plans()}) >= 2


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_an_output_edited_in_place_is_never_silently_wrong(budget: float) -> None:
    """Outputs are free to save; who edits one that was saved hears of it from autograd."""

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))  # backward of tanh reads its result

    model = Saved()
    x = torch.randn(8, 64)

    def edit(f: Model) -> Callable[[], Any]:
        def step() -> None:
            out = f(x)
            loss = out.sum()
            with torch.no_grad():
                out.mul_(2)
            loss.backward()

        return step

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edit(model)()
    try:
        edited = run(model, edit(compiled(model, budget)))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert_same(edited, run(model, lambda: model(x).sum().backward()))


@pytest.mark.parametrize("budget", [0, 0.3, 1])
def test_inputs_that_are_mutated_or_returned(budget: float) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = torch.cos(x)
        y = torch.sin(c @ w) @ torch.sigmoid(c)  # reads x as it was before the next line
        x.mul_(0.5)
        return y.tanh(), x, w.T, y[1:]

    def step(f: Model) -> list[Any]:
        torch.manual_seed(0)
        x, w = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
        out = f(x, w)
        (out[0].sum() + out[3].square().sum() + out[2].sum()).backward()
        return [x, w.grad, *(v.detach() for v in out)]

    assert_same(step(compiled(f, budget)), step(f))


# Plans --------------------------------------------------------------------------------------------


def stepped(model: nn.Module, f: Model, x: torch.Tensor) -> list[Any]:
    return run(model, lambda: f(x).square().mean().backward())


def test_plans_lists_what_compiled_models_run_on(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    stepped(mlp, compiled(mlp, 0.5, solver="greedy"), x)
    torch._dynamo.reset()
    stepped(mlp, compiled(mlp, "1MiB", solver="dp", cost="flops"), x)
    first, second = new_plans()
    assert (first.budget, first.cost) == ("0.5", "roofline:h100")
    assert (second.budget, second.cost, second.capacity) == ("1048576B", "flops", 2**20)
    assert remat.plans()[-1] is second


def test_a_plan_is_reused_on_its_graph_only(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans, tmp_path: Path
) -> None:
    joint = remat.capture(mlp, (x,), lower="eager")
    plan = remat.plan(joint, 0.3, "greedy")
    reference = stepped(mlp, mlp, x)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    for given in (plan, plan.to_json(), path, str(path)):
        torch._dynamo.reset()
        assert_same(stepped(mlp, compiled(mlp, plan=given), x), reference)
    assert len(new_plans()) == 4
    assert {p.decision for p in new_plans()} == {plan.decision}
    assert {(p.budget, p.saved_bytes) for p in new_plans()} == {("0.3", plan.saved_bytes)}
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="this plan is for graph 'Mlp'") as caught:
        compiled(mlp, plan=plan.to_json())(x[:64])
    assert isinstance(caught.value.inner_exception, remat.RematError)
    assert len(new_plans()) == 4


def test_a_plan_captured_for_inductor_fits_what_inductor_compiles(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    from torch._inductor import config

    with config.patch(fallback_random=True):
        plan = remat.plan(remat.capture(mlp, (x,)), 0.3, "greedy")
    f = compiled(mlp, lower="inductor", plan=plan, fallback_random=True)
    for mine, theirs in zip(stepped(mlp, f, x), stepped(mlp, mlp, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert new_plans()[-1].saved == plan.saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "8 bananas"}, "'bananas' is no unit of bytes"),
        ({"budget": 1.5}, "a share above 1"),
        ({"budget": 2}, "must save at least"),
        ({"solver": "gredy"}, "greedy"),
        ({"cost": "roofline:abacus"}, "abacus"),
        ({"lower": "sideways"}, "option 'lower' is 'sideways'"),
        ({"plan": "{"}, "not a saved plan"),
        ({"plan": "/nowhere/plan.json"}, "cannot be read"),
        ({"time_limit": -1}, "time_limit"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"no_such_option": 1, "lower": "inductor"}, "known to neither remat .* nor Inductor"),
        ({"max_autotune": True}, "does not use Inductor"),
    ],
)
def test_bad_options_say_what_is_wrong(
    mlp: Mlp, x: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(mlp, **options)(x)
    assert isinstance(caught.value.inner_exception, remat.RematError)


def test_inductor_options_pass_through(mlp: Mlp, x: torch.Tensor) -> None:
    from torch._inductor import config

    seen: list[bool] = []

    def look(graph: Any) -> None:
        seen.append(config.fallback_random)

    f = compiled(
        mlp.eval(), lower="inductor", fallback_random=True, **{"post-grad-custom-post-pass": look}
    )
    f(x).sum().backward()
    assert seen == [True, True]
    assert not config.fallback_random


# Partitioner and solver by themselves -------------------------------------------------------------


def aot(partition: Any) -> Any:
    return aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward), partition_fn=partition
    )


def test_partitioner_as_partition_fn(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    f = torch.compile(mlp, backend=aot(remat.partitioner(0.2, solver="greedy")))
    assert_same(stepped(mlp, f, x), stepped(mlp, mlp, x))
    assert [p.budget for p in new_plans()] == ["0.2"]


def test_partitioner_inside_inductor(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    from torch._inductor import config

    with (
        config.patch(custom_partitioner_fn=remat.partitioner(0.2, "dp"), fallback_random=True),
        functorch_config.patch(enable_autograd_cache=False),  # a cached step is not planned anew
    ):
        f = torch.compile(mlp)
        mine = stepped(mlp, f, x)
    for a, b in zip(mine, stepped(mlp, mlp, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [p.budget for p in new_plans()] == ["0.2"]


def test_uuid_tells_every_option_apart(mlp: Mlp, x: torch.Tensor) -> None:
    plan = remat.plan(remat.capture(mlp, (x,), lower="eager"), 0.3, "greedy")
    variants: list[dict[str, Any]] = [
        {},
        {"budget": 0.25},
        {"budget": "1MiB"},
        {"solver": "greedy"},
        {"solver": "dp"},
        {"cost": "flops"},
        {"cost": "roofline:a100"},
        {"time_limit": 5.0},
        {"plan": plan},
    ]
    uuids = [remat.partitioner(**v).uuid() for v in variants]
    assert len(set(uuids)) == len(variants)
    assert uuids == [remat.partitioner(**v).uuid() for v in variants]
    assert all(remat.__version__ in u for u in uuids)
    assert remat.torch_solver("dp").uuid() != remat.torch_solver("greedy").uuid()


@pytest.mark.parametrize(
    "options", [{"budget": -1}, {"solver": "nobody"}, {"cost": "guess"}, {"plan": "{}"}]
)
def test_partitioner_refuses_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(remat.RematError):
        remat.partitioner(**options)


def test_our_solver_in_pytorchs_own_partitioner() -> None:
    asked: list[remat.KnapsackProblem] = []

    class Spy(remat.Solver):
        name = "spy"

        def solve(self, problem: remat.KnapsackProblem, **kwargs: Any) -> list[int]:
            asked.append(problem)
            return list(remat.solve(problem, "dp").saved)

    step = build("llama")
    with functorch_config.patch(
        activation_memory_budget=0.5, activation_memory_budget_solver=remat.torch_solver(Spy())
    ):
        f = torch.compile(step.model, backend=aot(min_cut_rematerialization_partition))
        outcome = step.train(f)
    assert asked, "PyTorch did not ask our solver"
    assert asked[0].weights
    assert outcome.gradient_distance(step.train()) <= 1e-5


@pytest.mark.parametrize("solver", remat.solver_names())
def test_every_solver_in_pytorchs_own_partitioner(solver: str) -> None:
    torch.manual_seed(0)
    model, x = Mlp().eval(), torch.randn(128, 64)
    with functorch_config.patch(
        activation_memory_budget=0.5, activation_memory_budget_solver=remat.torch_solver(solver)
    ):
        f = torch.compile(model, backend=aot(min_cut_rematerialization_partition))
        assert_same(stepped(model, f, x), stepped(model, model, x))
