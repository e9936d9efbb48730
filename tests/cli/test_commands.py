"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remat
from remat.cli import models
from tests.cli.command import run, shown, told
from tests.cli.conftest import BLOCKS

MODELS = '''
print("nets.py is imported")

def sized(batch=8):
    model, _ = block()
    return model, (torch.zeros(batch, 16),)

def squared():
    weight = torch.nn.Parameter(torch.ones(8, 8))
    return (lambda x: (x.sin() @ weight).sin().sum()), (torch.zeros(8, 8),)

def keywords():
    x = torch.ones(3, requires_grad=True)
    return (lambda x, *, y: (x * y).sin().sum()), [x], {"y": torch.ones(3)}

def raises():
    return {}["nothing here"]

def leaves():
    raise SystemExit("gone")

def only_model():
    return torch.nn.Linear(2, 2)

def bare_tensor():
    return torch.nn.Linear(2, 2), torch.ones(2)

def no_model():
    return 7, ()

def frozen():
    return torch.nn.Linear(2, 2).requires_grad_(False), (torch.ones(2),)

class Fails(torch.nn.Module):
    def forward(self, x):
        raise ValueError("boom in forward")

def fails():
    return Fails(), (torch.ones(2, requires_grad=True),)

def broken(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos().sum()

def breaks():
    return broken, (torch.ones(4, requires_grad=True),)

def numbers():
    def branch(x):
        y = x.sin().exp().sin()
        if y.sum() > 0:
            y = y.cos().exp()
        return y.sum()
    return branch, (torch.ones(4, requires_grad=True),)

def overwritten():
    def f(x):
        h = x.exp()
        y = h * 2
        h.add_(1)
        return y.sum()
    return f, (torch.ones(4, requires_grad=True),)
'''  # fmt: skip
#: The line that raises.
RAISES = (BLOCKS + MODELS).splitlines().index('    return {}["nothing here"]') + 1


def test_plan_prints_and_draws_the_figures_that_the_library_gives(folder: Path) -> None:
    done = run("plan", "nets.py:block", "--budget", "0.5", "--explain", "--plot", "step.svg")
    assert done.exit_code == 0, done.output
    example = models.load("nets.py:block")
    made = remat.plan(remat.capture(example.model, example.args), 0.5)
    timed = "  decided by"  # with the seconds that it took
    for line in made.explain().splitlines():
        assert line.startswith(timed) or line in done.stdout.splitlines()
    for name, text in made.rows:
        assert name == timed.strip() or done.stdout.count(text) == 1
    assert re.search(rf"decided by +{made.solver}", done.stdout)
    assert "nets.py is imported" in done.stderr
    for part in ("drawn: step.svg", "instead of", "modelled"):
        assert part in done.stdout
    assert "without remat: peak" in (folder / "step.svg").read_text()


def test_plan_packs_what_it_saves() -> None:
    plain, packed = (
        told("plan", "nets.py:block", "--lower", "eager", *hooks)
        for hooks in ((), ("--hooks", "bf16"))
    )
    assert packed["saved"] == plain["saved"]
    assert packed["saved_bytes"] < plain["saved_bytes"]


def test_plan_offloads_what_pays_and_says_what_it_needs() -> None:
    asked = ("plan", "nets.py:block", "--lower", "eager")
    model = ("--budget", "peak:0.2", "--cost", "roofline:epyc", "--json")
    plan = remat.Plan.from_json(shown(*asked, "--offload", "100TB/s", *model))
    assert plan.link == "100000 GB/s"
    assert plan.gap >= 0
    without = remat.Plan.from_json(shown(*asked, *model))
    assert plan.recompute_cost + plan.exposed_time <= without.recompute_cost


def test_plan_saves_what_it_prints_and_the_plan_can_be_used(folder: Path) -> None:
    printed = shown("plan", "nets:block", "--json", "--save", "plan.json", "--lower", "eager")
    assert printed == (folder / "plan.json").read_text()
    saved = remat.Plan.from_json(printed)
    example = models.load("nets.py:block")
    joint = remat.capture(example.model, example.args, lower="eager")
    assert remat.plan(joint, plan=saved).saved == saved.saved


@pytest.mark.parametrize("where", ["remat.cli.models.load", "remat.units.Budget.parse"])
def test_ctrl_c_is_told_from_failure(
    where: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """While work is done, and while options are read."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    done = run("plan", "nets.py:block", "--budget", "0.5", "--save", "plan.json")
    assert done.exit_code == 130
    assert done.output == "interrupted\n"
    assert not (folder / "plan.json").exists()


def test_keyword_arguments_and_functions_are_models_too() -> None:
    shown("plan", "nets.py:keywords", "--lower", "eager")


def test_a_function_is_called_with_the_batch() -> None:
    few, many, usual = (
        told("plan", "nets.py:sized", "--lower", "eager", *batch)["full_bytes"]
        for batch in (("--batch", "4"), ("--batch", "8"), ())
    )
    assert few < many == usual


def test_a_budget_on_the_peak_tells_what_is_expected_of_compiled_code() -> None:
    asked = ("plan", "nets.py:block", "--budget", "peak:0.5")
    assert "is expected once Inductor has fused this plan" in shown(*asked)
    assert "as compiled" not in shown(*asked, "--lower", "eager")


def test_a_plan_above_its_budget_under_inductor_has_an_exit_code_of_its_own() -> None:
    """The block's simulated peak is 468,288 bytes, and the estimate under Inductor 566,784 bytes."""
    asked = ("plan", "nets.py:block", "--cost", "roofline:h100", "--budget", "500000B")
    done = run(*asked)
    assert done.exit_code == 4
    says = "above budget   a peak of 554 KiB (566784 bytes) is estimated under Inductor; expected at most 488"
    assert done.stdout.startswith(says)
    machine = run(*asked, "--json")
    assert machine.exit_code == 4
    assert json.loads(machine.stdout)["peak_bytes"] == 468288
    assert says in machine.stderr
    shown(*asked, "--lower", "eager")
    shown("plan", "nets.py:block", "--budget", "566784B")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", f"raised KeyError: 'nothing here' (at {{folder}}/nets.py:{RAISES})"),
        ("leaves", "raised SystemExit: gone"),
        ("only_model", "returned a Linear; expected (model, args) or (model, args, kwargs)"),
        ("bare_tensor", "args is a Tensor; expected a tuple of positional arguments"),
        ("no_model", "model is a int; expected a module or a function"),
        ("frozen", "nothing to differentiate"),
        ("fails", "boom in forward"),
        ("overwritten", "PyTorch fails at this program without remat as well"),
    ],
)
def test_a_model_that_cannot_be_planned_is_1(folder: Path, function: str, says: str) -> None:
    done = run("plan", f"nets.py:{function}", "--json")
    assert done.exit_code == 1, done.output
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "CaptureError"
    assert says.format(folder=folder) in error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:", "SyntaxError"),
        ("import torchh", "ModuleNotFoundError: No module named 'torchh'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_a_file_that_cannot_be_imported_is_1(folder: Path, source: str, says: str) -> None:
    (folder / "broken.py").write_text(source)
    done = run("plan", "broken.py:f")
    assert done.exit_code == 1
    assert says in done.stderr
    assert "broken.py:1" in done.stderr


def test_a_type_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("plan", "hf:llama")
    assert done.exit_code == 2
    assert "pip install 'remat[hf]'" in done.stderr


def test_pipes_that_close_leave_no_traceback_and_get_plain_and_uncut_text() -> None:
    script = "set -o pipefail; remat solvers --json | true; COLUMNS=40 remat solvers"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_inputs_that_may_be_refilled_cost_bytes() -> None:
    """Under every command that plans: the sine of the input is what eager autograd saves."""
    plain = told("plan", "nets.py:squared", "--lower", "eager", "--budget", "0")
    asked = ("nets.py:squared", "--lower", "eager", "--no-reread-inputs")
    kept = told("plan", *asked, "--budget", "0")
    assert (plain["reread_inputs"], plain["reread"]) == (True, ["primals_1"])
    assert (kept["reread_inputs"], kept["reread"]) == (False, [])
    assert kept["saved_bytes"] > plain["saved_bytes"]
    assert told("frontier", *asked)["frontiers"][0]["least_bytes"] == kept["saved_bytes"]
    (row,) = told("compare", *asked, "--solvers", "greedy", "--budgets", "0")["rows"]
    assert row["saved_bytes"] == kept["saved_bytes"]
    assert told("capture", *asked, "-o", "squared.json")["least_bytes"] == kept["saved_bytes"]


@pytest.mark.parametrize(
    ("command", "function", "needed"),
    [
        (["plan"], "breaks", "--no-fullgraph"),
        (["plan", "--no-fullgraph"], "numbers", "--no-fullgraph --run"),
    ],
)
def test_a_graph_break_is_told_with_options_of_the_command(
    command: list[str], function: str, needed: str
) -> None:
    model = f"nets.py:{function}"
    refused = run(*command, model)
    assert refused.exit_code == 1
    assert f"plan all graphs of the model together: remat plan {model} {needed}\n" in refused.stderr
    assert not any(word in refused.stderr for word in ("fullgraph=", "run=", ".."))


def test_graphs_of_a_broken_model_are_planned_together(folder: Path) -> None:
    text = shown("plan", "nets.py:numbers", "--no-fullgraph", "--run", "--save", "plans.json")
    plans = remat.PlanSet.from_json((folder / "plans.json").read_text())
    assert len(plans) == 2
    assert f"{plans.explain().splitlines()[0]}\n" in text


@pytest.mark.parametrize(
    ("args", "kind", "code", "says"),
    [
        (("plan", "nets.py:nobody"), "UsageError", 2, "has no 'nobody'"),
        (("plan", "nets.py:block", "--budget", "8 gigs"), "BadParameter", 2, "no unit of bytes"),
        (("plan", "nets.py:block", "--nothing"), "NoSuchOption", 2, "--nothing"),
        (("plan", "nets.py:block", "--budget", "peak:1B"), "BudgetError", 1, "infeasible"),
        (("plan", "nets.py:raises"), "CaptureError", 1, "raised KeyError"),
        (("solve", "missing.json"), "BadParameter", 2, "does not exist"),
    ],
)
def test_errors_are_json_where_json_was_asked_for(
    args: tuple[str, ...], kind: str, code: int, says: str
) -> None:
    done = run(*args, "--json")
    assert done.exit_code == code
    assert list(json.loads(done.stdout)) == ["error"]
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == kind
    assert says in error["message"]
    people = run(*args)
    assert (people.exit_code, people.stdout) == (code, "")
    if code == 1:
        assert people.stderr.splitlines()[-1] == f"error: {error['message']}"


def test_the_log_level_is_restored_after_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    before = logging.root.manager.disable
    shown("plan", "nets.py:block", "--lower", "eager")
    assert logging.root.manager.disable == before
