"""The plugin in ``examples`` as a stranger has it: installed, found, tested by the kit, planning."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from remat import capture, plan
from tests.plugins.stranger import COMMAND, output

MODEL = """
    import torch

    def mlp():
        layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
        return torch.nn.Sequential(*layers), (torch.randn(32, 64),), {}
"""

#: What the table says of the plugin, how its solver plans a model, and what it is in a process of its own.
SCRIPT = """
    import json
    import remat
    from remat.plugins import registry
    from remat.solvers import run

    listed = json.loads(command("solvers", "--json"))["solvers"]
    asked = ("--budget", "0.4", "--json", "--solver", "core")
    planned = json.loads(command("plan", "model.py:mlp", *asked))
    solver = registry().solver("core", isolation="foreign")
    problem = remat.KnapsackProblem((3, 4, 5), (3, 4, 6), 8)
    isolated = registry().is_foreign("core"), type(solver).__name__, run(solver, problem).saved
    print(json.dumps({"listed": listed, "planned": planned, "isolated": isolated}))
"""


@pytest.fixture(scope="module")
def found(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script finds there."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(textwrap.dedent(MODEL))
    loaded = json.loads(output(python, "-c", COMMAND + textwrap.dedent(SCRIPT), cwd=folder))
    assert isinstance(loaded, dict)
    return loaded


def test_it_is_found_by_its_entry_point(found: dict[str, Any]) -> None:
    (line,) = [entry for entry in found["listed"] if entry["name"] == "core"]
    assert line["available"]
    assert line["summary"].startswith("An expanding core")


def test_it_passes_the_kit_from_an_empty_folder(python, tmp_path) -> None:
    kit = ("-m", "pytest", "--pyargs", "remat.testing", "--solver=core", "-q")
    printed = output(python, *kit, "-p", "no:cacheprovider", cwd=tmp_path)
    assert int(printed.split(" passed")[0].split()[-1]) > 120
    assert "failed" not in printed


def test_it_plans_a_model(found: dict[str, Any]) -> None:
    core = found["planned"]
    assert core["saved_bytes"] <= core["capacity"]
    space: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL), space)
    assert core["recompute_cost"] <= plan(capture(*space["mlp"]()), 0.4, "dp").recompute_cost


def test_it_is_foreign_and_may_be_isolated(found: dict[str, Any]) -> None:
    assert found["isolated"] == [True, "IsolatedCore", [0, 2]]


def test_our_own_environment_does_not_have_it() -> None:
    assert importlib.util.find_spec("remat_core_solver") is None
