"""What `remat run` does in a script's process: compilations by Inductor are planned, and no others."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.integrations import backend, unedited
from remat.integrations.unedited import SETTINGS, Compilations
from tests.integrations.test_trainers import by_trainer, llama


class Net(nn.Module):
    """A block with values that are worth a decision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(torch.tanh(h) * torch.sigmoid(h))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    """The compilations of a script that runs in this process; planned graphs run without Inductor."""
    torch._dynamo.reset()
    found = Compilations()
    options = {"budget": "peak:0.5", "lower": "eager"}
    monkeypatch.setattr(unedited, "COMPILATIONS", found)
    monkeypatch.setattr(atexit, "register", lambda *_, **__: None)
    monkeypatch.setenv(SETTINGS, json.dumps({"options": options, "pid": os.getpid()}))
    with monkeypatch.context() as patched:
        name = "_TorchCompileInductorWrapper"
        patched.setattr(torch, name, getattr(torch, name))
        unedited.install()
        yield found
    torch._dynamo.reset()


def train(model: Any, size: int = 64) -> None:
    """Run forward and backward of one batch."""
    model(torch.randn(size, 8)).sum().backward()


def compiled_in_place(**options: Any) -> nn.Module:
    """Compile a model by its own method, as `Module.compile` does."""
    model = Net()
    model.compile(**options)
    return model


@pytest.mark.parametrize(
    "compiled",
    [
        lambda: torch.compile(Net(), fullgraph=True),
        lambda: torch.compile(fullgraph=True)(Net()),
        lambda: torch.compile(Net(), backend="inductor", mode="default"),
        compiled_in_place,
    ],
    ids=["default", "decorator", "by name", "in place"],
)
def test_every_call_for_inductor_makes_a_plan(
    compiled: Callable[[], Any], made: Compilations
) -> None:
    known = len(remat.plans())
    train(compiled())
    (plan,) = remat.plans()[known:]
    assert plan.requested.label == "peak 0.5"
    assert (made.calls, made.graphs) == (1, 1)
    assert made.report()[0].startswith("1 graph compiled, ")


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, {}),
        (
            {"mode": "max-autotune-no-cudagraphs"},
            {"max_autotune": True, "coordinate_descent_tuning": True},
        ),
        ({"options": {"epilogue-fusion": False}}, {"epilogue_fusion": False}),
    ],
    ids=["nothing", "mode", "options"],
)
def test_mode_and_options_go_to_inductor(
    asked: Any, settings: dict[str, Any], made: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def compile_step(gm: Any, inputs: Any, *, options: Any) -> Any:
        seen.append(options)
        return gm.forward

    monkeypatch.setattr(backend, "compile_step", compile_step)
    train(torch.compile(Net(), **asked))
    assert seen == [made.options | settings]


def test_pytorch_refuses_unknown_modes_and_options_as_before(made: Compilations) -> None:
    for asked in ({"mode": "nonsense"}, {"options": {"nonsense": True}}):
        with pytest.raises(RuntimeError, match="nonsense"):
            torch.compile(Net(), **asked)  # type: ignore[call-overload]


def test_sizes_that_change_and_evaluation_are_compiled_too(made: Compilations) -> None:
    known = len(remat.plans())
    compiled = torch.compile(Net(), dynamic=True)
    train(compiled, 64)
    train(compiled, 32)
    with torch.no_grad():
        compiled(torch.randn(16, 8))
    assert len(remat.plans()) == known + 1
    assert made.graphs == 2
    assert made.report()[0].startswith("2 graphs compiled, ")


def test_other_backends_keep_their_graphs(made: Compilations) -> None:
    known = len(remat.plans())
    train(torch.compile(Net(), backend="eager"))
    train(torch.compile(Net(), backend="aot_eager"))
    own = {"budget": 0.25, "lower": "eager"}
    train(torch.compile(Net(), backend="remat", options=own))  # type: ignore[arg-type]
    train(torch.compile(Net(), backend=remat.backend(budget=0.25, lower="eager")))
    assert [plan.requested.label for plan in remat.plans()[known:]] == ["0.25", "0.25"]
    assert (made.calls, made.graphs) == (0, 0)
    (line,) = made.report()
    assert "torch.compile nowhere, or names another backend" in line


def test_a_stance_holds_and_plans_come_back_after_it(made: Compilations) -> None:
    known = len(remat.plans())
    compiled = torch.compile(Net())
    with torch.compiler.set_stance("force_eager"):
        train(compiled)
    assert made.graphs == 0
    train(compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        train(compiled)
    with torch.compiler.set_stance("eager_on_recompile"):
        compiled(torch.randn(4, 8, dtype=torch.float64).float()).sum().backward()
    assert (made.graphs, len(remat.plans())) == (1, known + 1)


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_trains_as_without_remat(
    made: Compilations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer compiles by Accelerate, which names Inductor; ``torch_compile=True`` sets the same variable."""
    plain, ours = llama(), llama()
    for model, backend_of_accelerate in ((plain, "NO"), (ours, "INDUCTOR")):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend_of_accelerate)
        torch.manual_seed(1)
        by_trainer(model, tmp_path / backend_of_accelerate)
    assert (made.calls, made.graphs) == (1, 1)
    assert remat.plans()[-1].graph == "LlamaForCausalLM 0/0"
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    assert not torch.equal(ours.lm_head.weight, llama().lm_head.weight), "training did something"


def test_the_report_says_why_nothing_was_compiled(made: Compilations) -> None:
    assert "Reason: the script calls torch.compile nowhere" in made.report()[0]
    torch.compile(Net())  # never runs
    (line,) = made.report()
    assert "(1 call), but Dynamo compiled no graph" in line
    assert "DDP(torch.compile(model))" in line


def test_the_report_says_that_no_graph_has_gradients(
    made: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remat.integrations.compile_log.plans", lambda: ())
    with torch.no_grad():
        torch.compile(Net())(torch.randn(4, 8))
    assert made.report() == ["1 graph compiled, 0 plans made, because no graph computes gradients"]


def test_the_report_counts_graphs_that_an_error_refused(
    made: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remat.integrations.compile_log.plans", lambda: ())
    made.options["budget"] = "1KiB"
    with pytest.raises(remat.RematError, match="infeasible"):
        train(torch.compile(Net()))
    assert made.report() == ["0 graphs compiled, 0 plans made, 1 graph refused by an error"]


def test_long_reports_are_cut(made: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    train(torch.compile(Net()))
    plan = remat.plans()[-1]
    monkeypatch.setattr("remat.integrations.compile_log.plans", lambda: (plan,) * 11)
    lines = made.report()
    assert len(lines) == 2 + unedited.MOST_LINES
    assert lines[-1].startswith("3 more: ")


def test_only_the_script_itself_reports_that_nothing_was_compiled(
    made: Compilations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unedited._print_report(is_script=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "3")
    unedited._print_report(is_script=True)
    assert capsys.readouterr().err.startswith("remat run, rank 3: no graph was compiled")


def test_a_process_without_settings_is_left_alone(
    made: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SETTINGS)
    # Undone before `made` restores PyTorch's class; undone later, it would install remat's again.
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_TorchCompileInductorWrapper", before := object())
        unedited.install()
        assert torch._TorchCompileInductorWrapper is before
