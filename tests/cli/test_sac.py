"""The command `remat sac`: from a model to a plan, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import Result

from remat.checkpointing import plan as make_plan
from remat.errors import BudgetError
from remat.sac import SACPlan
from remat.sac.solve.milp import read_memory
from remat.units import Peak
from tests.cli.command import run

MODELS = '''
def real():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(4))), (torch.randn(128, 16),)

class Fails(torch.nn.Module):
    def forward(self, x):
        raise ValueError("boom in forward")

def fails():
    return Fails(), (torch.randn(2, requires_grad=True),)

class Prints(torch.nn.Linear):
    def forward(self, x):
        print("the model prints")
        return super().forward(x)

def prints():
    return torch.nn.Sequential(Prints(16, 16), torch.nn.Tanh()), (torch.randn(8, 16),)

class Leaves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x))) * x
        return x.sum()

def of_leaves():
    return Leaves(), (torch.randn(64, 32),)

def a_class():
    return Block, (torch.randn(2, 16),)

def function():
    return torch.sin, (torch.zeros(3, requires_grad=True),)
'''  # fmt: skip
MODEL = "nets.py:real"


def sac(*args: str) -> Result:
    return run("sac", *args)


def test_the_whole_way(folder: Path) -> None:
    result = sac(MODEL, "--memory", "0.8", "--run", "-o", "plan.json")
    assert result.exit_code == 0, result.output
    assert "checkpointing plan for a budget of" in result.output
    assert re.search(r"\npeak bytes +[\d.]+ KiB +[\d.]+ KiB\n", result.output)
    number = r"[\d.]+(e-\d+)?"
    for label in ("ms without checkpointing", "ms"):
        assert re.search(rf"\n{label} +{number} +[\d.,]{{1,6}}\n", result.output), "four digits"
    assert re.search(r"relative difference of gradients +0\n", result.output)
    assert "apply: remat.sac.apply(model, remat.sac.SACPlan.load('plan.json'))" in result.output
    assert SACPlan.from_json((folder / "plan.json").read_text()).modules


def test_json_says_what_was_planned_and_measured() -> None:
    result = sac(MODEL, "--memory", "0.8", "--run", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    plan = SACPlan.from_json(json.dumps(found["plan"]))
    measured = found["measured"]
    assert measured["plain_peak_bytes"] == plan.plain_peak_bytes
    assert 0.97 * plan.peak_bytes <= measured["peak_bytes"] <= plan.peak_bytes <= plan.budget_bytes
    assert measured["gradient_distance"] == 0
    assert sorted(found) == ["measured", "plan"]


def test_steps_run_where_nothing_needs_checkpointing() -> None:
    result = sac(MODEL, "--memory", "8GiB", "--run")
    assert result.exit_code == 0, result.output
    assert re.search(r"relative difference of gradients +0\n", result.output)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_plan_is_there_even_where_nothing_can_run(form: tuple[str, ...]) -> None:
    result = sac("nets.py:blocks", "--memory", "0.8", "--run", *form)
    assert result.exit_code == 1
    assert ("remat_sac_plan" if form else "checkpointing plan for") in result.stdout
    told = result.stderr
    if form:
        told = f"error: {json.loads(result.stdout)['error']['message']}"
    assert " ".join(told.split()) == (
        "error: the plan stands above, but no step could be run: '0.up.weight' of Sequential lies on the "
        "meta device, so no step can run: build model and inputs with real values, or only plan"
    )


def test_an_error_of_the_model_is_told_with_its_place() -> None:
    result = sac("nets.py:fails", "--memory", "0.8")
    assert result.exit_code == 1
    assert "raised ValueError: boom in forward (at " in " ".join(result.stderr.split())
    assert "nets.py:" in result.stderr.partition("(at ")[2]


def test_what_a_model_prints_goes_to_standard_error() -> None:
    result = sac("nets.py:prints", "--memory", "1GiB", "--run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"]
    assert "the model prints" in result.stderr


def test_options_reach_the_plan() -> None:
    options = "--memory 0.9 --world-size 2 --units 0,1 --json"
    result = sac(MODEL, *options.split())
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)["plan"]
    assert plan["world_size"] == 2
    assert {m["name"] for m in plan["modules"]} <= {"0", "1"}
    assert json.loads(result.output)["measured"] is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([MODEL, "--memory", "1KiB"], "no plan fits into 1 KiB (1024 bytes)"),
        ([MODEL, "--memory", "0.5", "--units", "7"], "units: no module is called '7'"),
        (["nets.py:function", "--memory", "0.9"], "expected a torch.nn.Module"),
        (["nets.py:a_class", "--memory", "0.8"], "'Block' is a class; pass an instance"),
        (["nets.py:of_leaves", "--memory", "0.5"], "the least that checkpointing gets the step to is"),
    ],
)  # fmt: skip
def test_what_is_refused(args: list[str], says: str) -> None:
    result = sac(*args)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


def test_the_door_takes_text_and_ratios() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    x = torch.randn(8, 4)
    assert make_plan(model, (x,), memory="1GiB").modules == ()
    with pytest.raises(
        BudgetError, match=r"expected bytes: an int above 1.*or a number from 0 to 1"
    ):
        make_plan(model, (x,), memory=Peak(0.5))
    assert make_plan(model, (x,), memory=1).modules == ()


@pytest.mark.parametrize("memory", [1, 1.0, "1", "1.0"])
def test_one_is_the_ratio_1_however_it_is_written(memory: float | str) -> None:
    assert read_memory(memory) == 1.0
    assert isinstance(read_memory(memory), float)
