"""Budgets in bytes hold for every size of a step with dynamic shapes: larger ones are planned anew."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, PlanError
from remat.graph.memory.liveness import StorageKind
from remat.graph.memory.storages import has_symbols
from remat.running.measure import measure_step
from remat.torch_compat import dynamo_config, functorch_config, inductor_config
from remat.units import Budget
from tests.e2e.doors import aot
from tests.steps import measure_held

T = torch.Tensor


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nets share the code that Dynamo compiles, which it compiles eight times at most."""
    yield
    torch.compiler.reset()


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*blocks)


def pointwise(x: T) -> T:
    return x.sin().exp().tanh()


def compiled(f: Callable[..., Any], budget: Any = None, **options: Any) -> Callable[..., Any]:
    """With ``dynamic``, of all sizes at once; else the first size is a number, and the second time it is a symbol."""
    dynamic = options.pop("dynamic", None)
    options = {"lower": "eager", **({} if budget is None else {"budget": budget}), **options}
    torch.compiler.reset()
    return torch.compile(f, backend="remat", dynamic=dynamic, options=options)


@pytest.mark.parametrize(
    ("by", "plans"),
    [
        ("aot", (3,)),
        # The second time, the step comes from AOTAutograd's cache, which holds the guards as well.
        ("inductor", (2, 0)),
        ("remat", (2, 2)),
    ],
)
def test_guards_are_those_of_the_code_under_every_backend(
    by: str, plans: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partitioner by itself guards its plans too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Of the second step, Inductor compiles two kernels for each plan.
    step, most = (net(), 40 * 1024) if by == "aot" else (pointwise, 60 * 32 * 4)
    partition = remat.partitioner(remat.Saved(most))
    told = {"custom_partitioner_fn": partition} if by == "inductor" else {}
    backends = {
        "aot": {"backend": aot(partition)},
        "inductor": {"backend": "inductor", "dynamic": True},
        "remat": {"backend": remat.backend(budget=remat.Saved(most)), "dynamic": True},
    }
    with inductor_config.patch(told), functorch_config.patch(enable_autograd_cache=True):
        for planned in plans:
            torch.compiler.reset()
            f, before = torch.compile(step, **backends[by]), len(remat.plans())
            for batch in (16, 24, 512):
                x = drawn(batch, 32)
                f(x).sum().backward()
                assert measure_held(f, (x,)) <= most, batch
            new = remat.plans()[before:]
            assert len(new) == planned
            assert by != "remat" or all(plan.planned_peak_bytes for plan in new)


@pytest.mark.parametrize("budget", ["saved:40KiB", remat.Peak("200KiB")])
def test_a_saved_plan_is_refused_at_sizes_at_which_it_takes_more(budget: Any) -> None:
    model = net()
    compiled(model, budget, dynamic=True)(torch.randn(24, 32)).sum().backward()
    plan = remat.plans()[-1].to_json()
    f = compiled(model, plan=plan, dynamic=True)
    for batch in (16, 24):
        f(torch.randn(batch, 32)).sum().backward()
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"saved plan .*at these sizes"
    ) as caught:
        f(torch.randn(512, 32))
    assert isinstance(caught.value.inner_exception, PlanError)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it at the graph break
def test_saved_plans_of_several_graphs_may_take_more_by_themselves() -> None:
    def step(x: T, weight: T) -> T:
        wide = torch.sin(x @ weight)
        torch._dynamo.graph_break()
        return wide.sum(-1).exp()

    def inputs(batch: int = 24) -> tuple[T, T]:
        x = torch.randn(batch, 32)
        torch._dynamo.mark_dynamic(x, 0)
        return x, torch.ones(32, 4096, requires_grad=True)

    graphs = remat.capture(step, inputs(), lower="eager", fullgraph=False)
    most = remat.plan(graphs, 1.0).peak_bytes
    plans = remat.plan(graphs, remat.Peak(most))
    assert max(p.peak_bytes for p in plans) > most
    f = compiled(step, plan=plans)
    f(*inputs()).sum().backward()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"saved plan .*at these"):
        f(*inputs(96))


@pytest.mark.parametrize("budget", [0.5, remat.Peak(0.5)])
def test_shares_are_planned_once_and_a_saved_plan_under_one_is_for_all_sizes(budget: Any) -> None:
    model, before = net(), len(remat.plans())
    f = compiled(model, budget, dynamic=True)
    for batch in (16, 512):
        f(torch.randn(batch, 32)).sum().backward()
    assert len(remat.plans()) == before + 1
    assert remat.plans()[-1].symbolic
    f = compiled(model, plan=remat.plans()[-1].to_json(), dynamic=True)
    for batch in (512, 16):
        f(torch.randn(batch, 32)).sum().backward()


def test_plans_know_whether_sizes_are_symbols() -> None:
    compiled(net(), dynamic=False)(torch.randn(8, 32)).sum().backward()
    assert not remat.plans()[-1].symbolic
    assert not has_symbols([torch.randn(3), 4])


def drawn(*shape: int) -> T:
    return torch.randn(*shape, requires_grad=True)


def memory(x: T, mem: T, w: T) -> T:
    """Attention over a length and a constant: near that constant it grows by less than later."""
    h = torch.cat([x, mem]) @ w
    a = (h @ h.mT).softmax(-1)
    return ((a @ h).sin() @ w)[: len(x)]


def layers(x: T, w: T) -> T:
    for _ in range(3):
        x = (x @ w).tanh().exp()
    return x


def pairs(x: T, y: T, mem: T, w: T) -> T:
    """Each row of the one with each of the other, and two constants."""
    x, y = (torch.cat([v, mem]) @ w for v in (x, y))
    return (x.sin() @ y.cos().mT).exp().sin().tanh().sum(0)


def two_parts(x: T, w: T) -> T:
    n = x.shape[0] // 2
    return ((x[:n] @ w).sin() * (x[n : 2 * n] @ w).exp()).tanh().cumsum(0).cos()


def batches(x: T, w: T) -> T:
    """Two sizes that multiply, and views of one storage that are all saved."""
    q, k, v = (x @ w).sin().chunk(3, -1)
    return ((q @ k.mT).softmax(-1) @ v).exp()


#: What is drawn for some numbers of rows, the sizes of the steps in their order, and budgets: bytes saved, and peak.
PROGRAMS: dict[str, tuple[Callable[..., T], Callable[..., Any], Any, int, int]] = {
    "memory": (memory, lambda n: (drawn(n, 16), drawn(16, 16), drawn(16, 16)), (8, 12, 100, 300), 300_000, 1_280_000),
    "layers": (layers, lambda n: (drawn(n, 32), drawn(32, 32)), (8, 16, 30, 100, 40), 12_000, 90_000),
    "pairs": (
        pairs,
        lambda n, m: (drawn(n, 8), drawn(m, 8), drawn(16, 8), drawn(8, 8)),
        ((4, 4), (5, 5), (40, 12), (9, 60), (250, 255)),
        300_000,
        1_100_000,
    ),
    "parts": (two_parts, lambda n: (drawn(n, 16), drawn(16, 16)), (6, 9, 33, 128, 127), 9_000, 70_000),
    "batches": (
        batches,
        lambda n, m: (drawn(n, m, 8), drawn(8, 24)),
        ((2, 6), (3, 8), (2, 40), (12, 8), (10, 40)),
        60_000,
        420_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "by", "lower"),
    [
        *((program, "peak", "eager") for program in PROGRAMS),
        # Random steps of `tests.fuzz.whole` hold saved bytes as well.
        *((program, "saved", "eager") for program in ("pairs", "parts")),
        ("layers", "peak", "inductor"),
    ],
)
def test_budgets_hold_in_the_allocator_at_all_sizes(program: str, by: str, lower: str) -> None:
    f, draw, sizes, saved, peak = PROGRAMS[program]
    peak = peak * 115 // 100 if torch_compat.holds_tangents() else peak  # the gradients of outputs
    budget = Budget(nbytes=saved) if by == "saved" else remat.Peak(peak)
    g = compiled(f, budget, lower=lower)
    taken = []
    for size in sizes if lower == "eager" else (16, 100):
        args = draw(*(size if isinstance(size, tuple) else (size,)))
        if lower == "inductor":  # a symbol from the first on, so that two plans are compiled
            torch._dynamo.mark_dynamic(args[0], 0)
        g(*args).sum().backward()
        if by == "saved":
            taken.append(measure_held(g, args))
        else:
            taken.append(measure_step(g, args, by="allocator").peak_bytes)
    assert max(taken) <= (saved if by == "saved" else peak), taken


@pytest.mark.parametrize(
    ("lower", "sizes"),
    # Last, twice the bytes: the step is planned again, and compilation warns.
    [("eager", (8, 12, 300, 310, 340, 300, 400, 800)), ("inductor", (8, 12, 400, 480))],
)
def test_each_excess_of_a_tenth_more_is_said(lower: str, sizes: tuple[int, ...]) -> None:
    """No plan meets the budget from the third size on; the figures are those of the allocator."""
    draw, budget = PROGRAMS["memory"][1], 1_200_000
    f = compiled(memory, remat.Peak(budget), lower=lower)
    said = 0
    for rows in sizes:
        args = draw(rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(*args).sum().backward()
        texts = [str(w.message) for w in caught if w.category is BudgetWarning]
        figures = [int(re.findall(r"\((\d+) bytes\)(?: at|\. Another)", t)[-1]) for t in texts]
        taken = measure_step(f, args, by="allocator").peak_bytes
        expected = [taken] if taken > max(budget, 1.1 * said) else []
        # Before PyTorch 2.13, the gradient of an output that is a view counts with its base.
        assert figures == pytest.approx(expected, rel=0.001 * torch_compat.holds_tangents())
        said = max([said, *figures])
    assert said > 1.25 * budget


def test_a_step_over_its_budget_is_planned_again_at_sizes_that_may_meet_it() -> None:
    _, draw, _, _, budget = PROGRAMS["pairs"]
    f = compiled(pairs, remat.Peak(budget), dynamic=True)
    f(*draw(4, 4)).sum().backward()
    with pytest.warns(BudgetWarning, match="its budget cannot be held"):
        f(*draw(500, 500)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        f(*draw(1500, 10)).sum().backward()
    assert remat.plans()[-1].peak_bytes <= budget


def test_a_plan_is_made_anew_only_for_sizes_at_which_it_takes_more() -> None:
    f = compiled(pointwise, Budget(nbytes=60 * 32 * 4))
    before = len(remat.plans())
    planned = []
    for rows in (10, 20, 60, 61, 100, 30):
        f(marked(rows, 32)).sum().backward()
        planned.append(len(remat.plans()) - before)
    assert remat.plans()[before].saved_bytes == 10 * 32 * 4  # so that 60 rows fit
    assert planned == [1, 1, 1, 2, 2, 2]


def test_views_of_one_input_count_once() -> None:
    def f(x: T, a: T, b: T) -> T:
        h = (x @ a).sin()
        return (h @ h.mT).exp().sum(0) + b.sum()

    a = torch.randn(128, 128)  # 64 KiB, which both have
    g = compiled(f, remat.Peak(110_000))
    for rows in (4, 5, 8):
        args = (drawn(rows, 128), a, a.view(-1))
        g(*args).sum().backward()
        assert measure_step(g, args, by="allocator").peak_bytes <= 110_000


def test_sizes_that_bytes_do_not_depend_on_are_not_guarded() -> None:
    def f(x: T, y: T) -> T:
        return x.sin().exp().sum() + y.sum()

    g = compiled(f, Budget(nbytes=100_000), dynamic=True)
    before = len(remat.plans())
    for rows in (5, 50_000):
        g(drawn(7, 9), drawn(rows, 3)).backward()
    assert len(remat.plans()) - before == 1


def marked(*shape: int, **ranges: int) -> T:
    x = drawn(*shape)
    torch._dynamo.mark_dynamic(x, 0, **ranges)
    return x


#: Activations that are alive at the peak. Before PyTorch 2.13, the gradient of the output is one of them.
ALIVE = 3 + torch_compat.holds_tangents()


@pytest.mark.parametrize(
    ("budget", "first", "lower"),
    [
        (Budget(nbytes=2 * 64 * 32 * 4), 2, "eager"),
        (remat.Peak(ALIVE * 64 * 32 * 4 + 40_000), 2, "eager"),
        (remat.Peak(ALIVE * 64 * 32 * 4 + 40_000), 8, "inductor"),
    ],
)
def test_sizes_of_a_declared_range_are_planned_for(budget: Budget, first: int, lower: str) -> None:
    """By one plan, whose figures are those of the largest, 64 rows."""
    f, w = compiled(layers, budget, lower=lower), drawn(32, 32)
    before = len(remat.plans())
    for rows in (first, 9, 64):
        args = (marked(rows, 32, min=2, max=64), w)
        f(*args).sum().backward()
        if budget.nbytes is not None:
            assert measure_held(f, args) <= budget.nbytes
        else:
            taken = measure_step(f, args, by="allocator").peak_bytes
            assert taken <= (budget.peak_bytes or 0)
    (plan,) = remat.plans()[before:]
    if budget.nbytes is None:
        assert plan.peak_bytes == plan.timeline.peak_bytes
    else:
        held = [x for x in plan.timeline.lifetimes if x.kind is StorageKind.SAVED]
        assert plan.saved_bytes == sum(x.nbytes for x in held)


def test_a_budget_that_the_largest_declared_size_cannot_hold_is_refused_by_name() -> None:
    f = compiled(layers, remat.Peak(60_000))
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"peak.*declared sizes, L\['x'\].* = 4000"
    ) as caught:
        f(marked(8, 32, min=2, max=4000), drawn(32, 32))
    assert isinstance(caught.value.inner_exception, BudgetError)


def chosen(x: T, w: T) -> T:
    i = (x[:, 0] > 0).nonzero().squeeze(1)
    h = torch.tanh(x[i] @ w)
    return (h.exp() @ w.mT).sin().sum(0)


def counted(x: T, n: T) -> T:
    k = n.item()
    torch._check(k >= 2)
    return (torch.ones(k, 8).sin() @ x.mT.exp()).cos().sum(0)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize(("bound", "number"), [(10**6, "4,096"), (512, "512")])
def test_a_refusal_says_what_a_size_that_the_data_tells_counts_as(
    bound: int, number: str, lower: str
) -> None:
    def bounded(x: T, n: T) -> T:
        k = n.item()
        torch._check(k <= bound)
        return counted(x, n)

    with dynamo_config.patch(capture_scalar_outputs=True):
        f = compiled(bounded, remat.Peak(100), lower=lower)
        with pytest.raises(BudgetError) as caught:
            f(drawn(6, 8), torch.tensor(4))
    says = rf"a size that depends on data counts by a number: u\d \(test_step_guards.py:\d+ .*\) as {number}\."
    assert re.search(says, str(caught.value), re.IGNORECASE)
    assert "torch._check(size <= N), makes it N at most" in str(caught.value)


@pytest.mark.parametrize(
    ("by", "lower"), [("saved", "eager"), ("peak", "eager"), ("peak", "inductor")]
)
@pytest.mark.filterwarnings("ignore::remat.errors.BudgetWarning")
def test_sizes_that_the_data_tells_are_looked_at(by: str, lower: str) -> None:
    saved = by == "saved"
    budget = Budget(nbytes=1_500_000) if saved else remat.Peak(2_000_000)
    x = drawn(6, 8)
    with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        f = compiled(counted, budget, lower=lower)
        with warnings.catch_warnings():
            warnings.simplefilter("error", BudgetWarning)
            for n in (4, 4096, 5000):
                f(x, torch.tensor(n)).sum().backward()
        what = "keeps" if saved else "has a peak of"
        args = (x, torch.tensor(100_000))
        with pytest.warns(BudgetWarning, match=f"{what} .*= 100000, above the .* = 4096") as caught:
            f(*args).sum().backward()
        (figure,) = (int(n) for n in re.findall(r"\((\d+) bytes\) at", str(caught[0].message)))
        taken = measure_held(f, args) if saved else measure_step(f, args, by="allocator").peak_bytes
        assert figure == pytest.approx(taken, rel=0.01)
        with warnings.catch_warnings():  # no more than said, by a tenth
            warnings.simplefilter("error", BudgetWarning)
            f(x, torch.tensor(109_000)).sum().backward()
        with pytest.warns(BudgetWarning, match=f"{what} .*= 200000, above the .* = 4096"):
            f(x, torch.tensor(200_000)).sum().backward()


def test_a_mask_is_looked_at_beside_sizes_of_inputs() -> None:
    w = drawn(64, 64)
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(chosen, Budget(nbytes=2_000_000), dynamic=True)
        f(torch.rand(8, 64, requires_grad=True), w).sum().backward()
        with pytest.warns(BudgetWarning, match="keeps .*nonzero.* = 40000, above"):
            f(torch.rand(40_000, 64, requires_grad=True), w).sum().backward()


def test_a_partitioner_by_itself_says_that_sizes_from_the_data_are_not_checked() -> None:
    with dynamo_config.patch(capture_scalar_outputs=True):
        f = torch.compile(counted, backend=aot(remat.partitioner(Budget(nbytes=1_500_000))))
        with pytest.warns(
            BudgetWarning,
            match=r"holds its budget .* = 4096\. The step takes more at larger sizes",
        ):
            f(drawn(6, 8), torch.tensor(4)).sum().backward()
