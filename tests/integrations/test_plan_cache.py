"""Steps that come from AOTAutograd's cache: their plans come with them, and nothing else is taken for them."""

from __future__ import annotations

import inspect
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import remat
from remat.errors import BudgetWarning, Warned
from remat.graph.ops import default_taxonomy
from remat.integrations import compiled_budget, partition_options, plan_cache
from remat.integrations.budget_loop import Attempt, restore
from remat.integrations.compiled_budget import CompiledBudget
from remat.integrations.partitioner import Partitioner
from remat.integrations.plan_cache import CachedPlan, traces_of
from remat.integrations.replaced_methods import GeneratedCode
from remat.integrations.stages import Arrived
from remat.passes.packing.pairs import HooksWarning
from remat.planning.search.compiled import CompiledSearch
from remat.plugins import identity

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Local(remat.Solver):
    """A solver from outside of remat, of no version that anybody knows."""

    name = "local"

    def solve(self, problem: Any, **_: Any) -> list[int]:
        return []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """PyTorch's caches, empty and switched on."""
    from torch._functorch import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with config.patch(enable_autograd_cache=True):
        yield tmp_path
    torch._dynamo.reset()


def step(
    model: nn.Module, x: torch.Tensor, **options: Any
) -> tuple[list[torch.Tensor], remat.Plan]:
    """Gradients and plan of a step that is compiled as if in a new process."""
    torch._dynamo.reset()
    counters.clear()
    before = len(remat.plans())
    compiled = torch.compile(model, backend="remat", options={"budget": 0.5, **options})
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    (plan,) = remat.plans()[before:]
    return [g.clone() for g in found], plan


def step_of(**options: Any) -> Arrived:
    """A step as the backend has it before it is planned."""
    return Arrived(options=Partitioner(**options), earlier=frozenset(), watched=True)


def hits() -> int:
    return counters["aot_autograd"]["autograd_cache_hit"]


def shown(plan: remat.Plan) -> list[str]:
    """What a plan explains, but for the seconds that it took."""
    return [line for line in plan.explain().splitlines() if "decided by" not in line]


class Shifted(nn.Module):
    """Adds a constant tensor, which the joint graph fetches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + torch.tensor([3, 5]).sum())


def test_cached_steps_above_their_budget_compile_no_kernels(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if the step is planned, nor if all its compilations come from the cache."""
    made: list[GeneratedCode] = []
    begin = GeneratedCode.__init__
    monkeypatch.setattr(
        GeneratedCode, "__init__", lambda self, *args: begin(made.append(self) or self, *args)
    )

    def again(self: CompiledBudget, *_: Any, **__: Any) -> bool:
        self.rounds[0].times += 1
        self.rounds[0].excess += 1  # part of the key of the next compilation
        return self.times < 2

    monkeypatch.setattr(CompiledBudget, "replans", again)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(16, 32)
    for _ in range(2):
        step(model, x, budget=remat.Peak(1.0))
        assert [len(made), sum(code.load.cache_info().currsize for code in made)] == [4, 2]
        made.clear()
    assert hits() == 2


def test_a_step_from_the_cache_has_its_plan(cache: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), Shifted(), nn.Linear(64, 32), nn.Tanh())
    x = torch.randn(16, 32)
    policies = {"policies": {"3": "recompute"}}
    gradients, plan = step(model, x, **policies)
    assert hits() == 0
    again, same = step(model, x, **policies)
    assert hits() == 1
    assert same.policies == plan.policies == '{"3": "recompute"}'
    assert json.loads(same.to_json()) == json.loads(plan.to_json())
    for a, b in zip(again, gradients, strict=True):
        assert torch.equal(a, b)
    assert same._modules is None, "nothing is made of it before somebody asks"
    assert [n.name for n in same.backward.graph.nodes] == [
        n.name for n in plan.backward.graph.nodes
    ]
    assert [n.name for n in same.forward.graph.nodes] == [n.name for n in plan.forward.graph.nodes]
    assert shown(same) == [line.replace(plan.graph, same.graph) for line in shown(plan)]
    # What makes its modules anew can be pickled, as AOTAutograd's key asks for.
    restored = Partitioner(plan=same)
    assert pickle.loads(pickle.dumps(restored)).uuid() == restored.uuid()
    # Another budget is another step; nothing of the first is taken for it.
    _, other = step(model, x, budget=0.0, **policies)
    assert hits() == 0
    assert other.budget == "0"
    # Without what was kept beside it, a step is planned anew.
    shutil.rmtree(cache / "remat")
    _, anew = step(model, x, **policies)
    assert hits() == 1
    assert anew._modules is not None
    assert anew.saved == plan.saved


def test_a_step_whose_share_of_the_peak_was_not_held_is_planned_again_by_all(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the first plan took a byte too much: who finds its step in the cache does not take it for the answer."""
    planned = []
    search = CompiledSearch.search_within

    def searched(self: CompiledSearch, *args: Any, **kwargs: Any) -> Any:
        planned.append(len(self.search.pool))
        return search(self, *args, **kwargs)

    def taken(made: remat.Plan, request: Any) -> tuple[int, int]:
        over = len(planned) == 1
        return (made.estimated_peak_bytes + 1, made.estimated_peak_bytes) if over else (0, 0)

    monkeypatch.setattr(CompiledSearch, "search_within", searched)
    monkeypatch.setattr(compiled_budget, "compiled_bytes", taken)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
    x = torch.randn(16, 32)
    _, plan = step(model, x, budget=remat.Peak(0.5))
    assert len(planned) == 2
    assert planned[1] > planned[0] == 0, (
        "the second search goes on from the candidates of the first"
    )
    _, same = step(model, x, budget=remat.Peak(0.5))
    assert hits()
    assert len(planned) == 3, "the first one; the second comes from the cache"
    assert (same.saved, same.peak_bytes) == (plan.saved, plan.peak_bytes)


# What decides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"budget": remat.Peak("1GiB")},
        {"budget": remat.Peak(0.5)},
        {"pipeline": "min-cut,partition"},
        {"pipeline": "min-cut,partition,reorder-backward"},
        {"hooks": "bf16"},
        {"hooks": "float8"},
        {"policies": {"1": "recompute"}},
        {"policies": {"1": "save"}},
    ],
)
def test_peaks_pipelines_hooks_and_policies_make_other_keys(options: dict[str, Any]) -> None:
    plain = remat.partitioner()
    other = remat.partitioner(**options)
    assert other.uuid() != plain.uuid()
    assert other.uuid() == remat.partitioner(**options).uuid()


def test_the_default_cost_model_by_its_name_is_the_default() -> None:
    left_out, named = Partitioner(budget=0.5), Partitioner(budget=0.5, cost="auto")
    assert named.request.cost == left_out.request.cost
    assert str(named.request.cost) == "auto"


def test_an_option_that_is_added_is_in_the_key() -> None:
    """What the constructor takes it keeps, and what it keeps is told, unless it is named as harmless."""
    partition = Partitioner()
    taken = set(inspect.signature(remat.partitioner).parameters)
    harmless = {"repro", "rank_wait_s"}
    assert taken - harmless <= set(partition.described())
    key = partition.uuid()
    partition.some_option_to_come = 1  # type: ignore[attr-defined]
    assert partition.uuid() != key


def test_what_is_known_of_operators_and_the_code_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = Partitioner()
    keys = {partition.uuid()}
    views = default_taxonomy().views
    assert torch.sin not in views
    views.add(torch.sin)
    try:
        keys.add(partition.uuid())
    finally:
        views.remove(torch.sin)
    monkeypatch.setattr(identity, "_origin", lambda module: "edited")
    keys.add(partition.uuid())
    monkeypatch.setattr(plan_cache, "declared", lambda: ("mine::op",), raising=False)
    keys.add(partition.uuid())
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({}, True),
        ({"hooks": "bf16"}, True),
        ({"hooks": (torch.neg, torch.neg)}, False),
        ({"solver": Local()}, False),
        ({"pipeline": "min-cut,partition"}, False),
    ],
)
def test_only_what_another_process_can_know_is_kept(options: dict[str, Any], keeps: bool) -> None:
    assert Partitioner(**options).keeps_steps is keeps


def test_a_solver_that_nobody_knows_is_of_this_process_and_compiled_graphs_have_its_decision() -> (
    None
):
    partition, known = Partitioner(solver=Local()), Partitioner()
    assert not identity.is_known_elsewhere(partition.described())
    assert partition.key(graphs_only=True) == known.key(graphs_only=True, over="1")
    hooked = Partitioner(hooks="bf16")
    assert hooked.key(graphs_only=True) != known.key(graphs_only=True)


def test_ranks_that_are_to_agree_plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_options, "other_ranks", object)
    assert not Partitioner().keeps_steps
    assert Partitioner(rank_wait_s=None).keeps_steps


def traced(function: Any) -> str:
    made: list[str] = []

    def look(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.append(traces_of(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=look, dynamic=True)(torch.ones(int(function.__defaults__[0])))
    return made[0]


def test_lines_and_the_sizes_that_symbols_stand_for_tell_steps_apart() -> None:
    def first(x: torch.Tensor, n: int = 3) -> torch.Tensor:
        return x.sin()

    def second(x: torch.Tensor, n: int = 3) -> torch.Tensor:
        return x.sin()

    keys = [traced(first), traced(first), traced(second)]
    first.__defaults__ = (7,)
    keys.append(traced(first))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


# What is restored -----------------------------------------------------------------------------------


def test_warnings_that_concern_later_processes_are_told_again() -> None:
    warned: list[Warned] = [
        ("high", remat.PeakWarning),
        ("over", BudgetWarning),
        ("eager", HooksWarning),
    ]
    joint = remat.capture(nn.Linear(4, 4), (torch.randn(2, 4),), lower="eager")
    kept = CachedPlan(plan=remat.plan(joint).to_json(), warnings=plan_cache.repeated(warned))
    with pytest.warns(UserWarning, match="high|eager") as told:
        restore(step_of(budget=0.5), torch.fx.symbolic_trace(nn.Tanh()), kept)
    assert [(str(w.message), w.category) for w in told] == [warned[0], warned[2]]


def test_a_second_graph_is_one_in_the_cache_too() -> None:
    joint = remat.capture(nn.Linear(4, 4), (torch.randn(2, 4),), lower="eager")
    step = step_of(budget="saved:1MiB")
    plan = remat.plan(joint, "saved:1MiB")
    gm = torch.fx.symbolic_trace(nn.Tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(2):
            restore(step, gm, CachedPlan(plan=plan.to_json()))
    other = plan.to_json().replace(plan.fingerprint, "0" * 64)
    with pytest.warns(BudgetWarning, match="a second graph"):
        restore(step, gm, CachedPlan(plan=other))


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2, "digest": "0", "kept": "{}"}'])
def test_what_is_damaged_is_not_there(cache: Path, content: str) -> None:
    halves = ("forward", "backward")
    plan_cache.keep(halves, CachedPlan(plan="p", warnings=(("a", "b"),)))
    assert plan_cache.find(halves) == CachedPlan(plan="p", warnings=(("a", "b"),))
    assert plan_cache.find(("forward", "another")) is None
    (file,) = (cache / "remat").rglob("*.json")
    file.write_text(content)
    assert plan_cache.find(halves) is None


def test_operators_that_are_no_longer_what_they_were_are_not_there(cache: Path) -> None:
    @torch.library.custom_op("remat_kept::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    noise.register_fake(torch.empty_like)
    noise.register_autograd(lambda ctx, gradient: gradient)
    joint = remat.capture(lambda x: noise(x.sin()).sum(), (torch.ones(4, requires_grad=True),))
    kept = CachedPlan(joint="graph", operators=plan_cache.operators_of(joint))
    assert [name for name, _ in kept.operators] == ["remat_kept::noise"]
    plan_cache.keep(["a", "b"], kept)
    assert plan_cache.find(["a", "b"]) == kept
    remat.declare_pure("remat_kept::noise")
    try:
        assert plan_cache.find(["a", "b"]) is None
    finally:
        remat.undeclare_pure("remat_kept::noise")
    plan_cache.keep(
        ["a", "b"], CachedPlan(joint="graph", operators=(("remat_kept::gone", "known"),))
    )
    assert plan_cache.find(["a", "b"]) is None


def test_what_other_graphs_of_the_step_hold_and_a_budget_that_was_given_up_are_in_the_key() -> None:
    step, known = step_of(budget=remat.Peak("1GiB")), CompiledBudget()
    keys = {Attempt(step, known, has_two_graphs=True, traces="").uuid()}
    step = replace(step, other_graphs_runs=1, other_graphs_bytes=4096)
    keys.add(Attempt(step, known, has_two_graphs=True, traces="").uuid())
    step = replace(step, over="no plan is within it")
    keys.add(Attempt(step, known, has_two_graphs=True, traces="").uuid())
    keys.add(Attempt(step, known, has_two_graphs=True, traces="lines").uuid())
    known.rounds[0].excess = 1
    keys.add(Attempt(step, known, has_two_graphs=True, traces="").uuid())
    assert len(keys) == 5
