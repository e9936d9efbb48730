"""`remat.backend`: options are checked at once, errors keep their class, and long compilations say what they do."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn

import remat
from remat import torch_compat
from remat.errors import BudgetError, ProblemError
from remat.integrations import compile_progress
from remat.integrations.compile_progress import CompileProgress
from remat.integrations.stages import Compiled


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


X = torch.ones(16, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bugdet": "5MiB"}, "did you mean 'budget'"),
        ({"lower": "eagre"}, "'inductor', 'eager'"),
        ({"lower": "eager", "mode": "max-autotune"}, "does not use Inductor"),
        ({"mode": "fastest"}, "mode is 'fastest'; expected one of 'default'"),
        ({"mode": []}, r"mode is \[\]; expected one of"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_at_once(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(remat.RematError, match=expected):
        remat.backend(**options)


def test_it_compiles_what_the_name_and_options_compile(model: nn.Module) -> None:
    by_object = torch.compile(model, backend=remat.backend(budget=0.25, lower="eager"))
    by_name = torch.compile(model, backend="remat", options={"budget": 0.25, "lower": "eager"})
    found = []
    for compiled in (by_object, by_name):
        torch._dynamo.reset()
        model.zero_grad()
        compiled(X).sum().backward()
        found.append((remat.plans()[-1].saved, [p.grad for p in model.parameters()]))
    (saved, grads), (same, likewise) = found
    assert saved == same
    assert all(map(torch.equal, grads, likewise))


def test_settings_of_inductor_and_modes_reach_inductor(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remat.integrations import backend

    given: list[dict[str, Any]] = []

    def compile_none(arrived: Any, gm: Any, inputs: Any, patches: Any) -> Any:
        given.append(patches)
        return Compiled(planned=None, run=gm.forward)

    monkeypatch.setattr(backend, "compile_within_budget", compile_none)
    made = remat.backend(budget=0.5, mode="max-autotune-no-cudagraphs", epilogue_fusion=False)
    torch.compile(model, backend=made)(X)
    assert given[0]["max_autotune"] is True
    assert given[0]["epilogue_fusion"] is False


def test_options_beside_it_are_refused(model: nn.Module) -> None:
    compiled = torch.compile(
        model, backend=remat.backend(lower="eager"), options={"max_autotune": True}
    )
    with pytest.raises(ProblemError, match=r"give remat\.backend all of them"):
        compiled(X)


@pytest.mark.parametrize("by_name", [True, False])
def test_errors_keep_their_class_and_end_with_our_message(model: nn.Module, by_name: bool) -> None:
    options: dict[str, Any] = {"budget": "1B"}
    by_object = {"backend": remat.backend(**options)}
    given: dict[str, Any] = {"backend": "remat", "options": options} if by_name else by_object
    with pytest.raises(BudgetError) as caught:
        torch.compile(model, **given)(X)
    assert isinstance(caught.value, torch_compat.BackendCompilerFailed)
    assert str(caught.value).endswith("budget=remat.Peak(0.0) runs that plan")
    assert isinstance(caught.value.inner_exception, BudgetError)


def test_a_copy_of_a_compiled_model_compiles_by_the_same_options(model: nn.Module) -> None:
    compiled = torch.compile(model, backend=remat.backend(budget=0.0, lower="eager"))
    compiled(X).sum().backward()
    other = copy.deepcopy(compiled)
    torch._dynamo.reset()
    before = remat.plans()[-1]
    other(X).sum().backward()
    assert remat.plans()[-1] is not before
    assert remat.plans()[-1].saved == before.saved


def test_other_options_in_the_same_dict_count(model: nn.Module) -> None:
    options: dict[str, Any] = {"budget": 1.0, "lower": "eager"}
    first = torch.compile(model, backend="remat", options=options)
    first(X).sum().backward()
    options["budget"] = 0.0
    torch._dynamo.reset()
    torch.compile(model, backend="remat", options=options)(X).sum().backward()
    full, least = remat.plans()[-2:]
    assert (full.requested.share, least.requested.share) == (1.0, 0.0)
    del first


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def talks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "SILENT_S", 0.0)
    monkeypatch.delenv(compile_progress.QUIET, raising=False)


@pytest.fixture(scope="module")
def plan() -> remat.Plan:
    joint = remat.capture(nn.Sequential(nn.Linear(8, 32), nn.GELU()), (X,), lower="eager")
    return remat.plan(joint, 0.0)


def test_a_long_compilation_shows_its_stage_and_ends_with_the_plan(
    plan: remat.Plan, talks_at_once: None
) -> None:
    stream = Terminal()
    with CompileProgress("Net 0/0", stream) as progress:
        progress.stage("planning")
        assert stream.getvalue().endswith("\x1b[2Kremat: Net 0/0: planning\r")
        progress.finish(plan)
    last = stream.getvalue().split("\n")[0].split("\r")[-1]
    assert "peak" in last
    assert "instead of" in last
    assert last.endswith("%; details: remat.plans()[-1].explain()")


@pytest.mark.parametrize("why", ["piped", "quiet", "closed"])
def test_nothing_is_written_to_a_pipe_or_if_quiet(
    why: str, plan: remat.Plan, monkeypatch: pytest.MonkeyPatch, talks_at_once: None
) -> None:
    stream = io.StringIO() if why == "piped" else Terminal()
    written = stream
    if why == "closed":
        stream = Terminal()
        stream.close()
    if why == "quiet":
        monkeypatch.setenv(compile_progress.QUIET, "1")
    with CompileProgress("Net 0/0", stream) as progress:
        progress.stage("planning")
        progress.finish(plan)
    assert written.getvalue() == ""


@pytest.mark.parametrize("fails", [False, True])
def test_the_stage_of_a_short_or_failing_compilation_is_cleared(
    fails: bool, plan: remat.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(compile_progress.QUIET, raising=False)
    monkeypatch.setattr(compile_progress, "SILENT_S", 60.0)
    stream = Terminal()
    with contextlib.suppress(KeyError), CompileProgress("Net 0/0", stream) as progress:
        if fails:
            raise KeyError
        progress.finish(plan)
    assert stream.getvalue() == "\r\x1b[2Kremat: Net 0/0: tracing forward and backward\r\r\x1b[2K"


def test_the_stages_of_a_compilation_are_named(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    monkeypatch.setattr(CompileProgress, "stage", lambda self, text: stages.append(text))
    monkeypatch.setattr(
        torch_compat, "compile_fx_inner", lambda gm, *_, **__: make_boxed_func(gm.forward)
    )
    with torch_compat.functorch_config.patch(enable_autograd_cache=False):
        torch.compile(model, backend=remat.backend(budget=0.5))(X).sum().backward()
    assert stages[1:4] == ["planning", "compiling forward", "compiling backward"]


def cyclic(x: torch.Tensor, k: int) -> torch.Tensor:
    return x[torch.randperm(16)[:k]].sin().sum()


def linear(x: torch.Tensor, k: int) -> torch.Tensor:
    return x[torch.randperm(16)[:k]].sum()


@pytest.mark.parametrize("program", [cyclic, linear])
def test_a_forward_that_inductor_makes_need_backward_is_named_and_runs_without_inductor(
    program: Any,
) -> None:
    def gradient(run: Any, k: int) -> torch.Tensor:
        torch.manual_seed(k)
        x = torch.linspace(0, 1, 128).view(16, 8).requires_grad_()
        return torch.autograd.grad(run(x, k), x)[0]

    torch.compiler.reset()
    fused = torch.compile(program, backend="remat")
    gradient(fused, 4)  # the next size is a symbol
    with pytest.raises(Exception, match=r"pattern randperm_index_add .*'lower': 'eager'") as caught:
        gradient(fused, 5)
    if program is linear:
        assert "forward outputs depend on backward" in str(caught.value)
    torch.compiler.reset()
    unfused = torch.compile(program, backend="remat", options={"lower": "eager"})
    for k in (4, 5, 6):
        assert torch.equal(gradient(unfused, k), gradient(program, k))
