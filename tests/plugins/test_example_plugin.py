"""The plugin in ``examples`` as a stranger has it: installed, found, tested by the kit, planning."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from remat import capture, plan
from tests.plugins.stranger import install, output, remat

PLUGIN = Path(__file__).parents[2] / "examples" / "solver_plugin"

MODEL = """
    import torch

    def mlp():
        layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
        return torch.nn.Sequential(*layers), (torch.randn(32, 64),), {}
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the plugin."""
    return install(PLUGIN, tmp_path_factory.mktemp("stranger"))


def test_it_is_found_by_its_entry_point(python, tmp_path) -> None:
    listed = json.loads(remat(python, "solvers", "--json", cwd=tmp_path))["solvers"]
    (line,) = [entry for entry in listed if entry["name"] == "core"]
    assert line["available"]
    assert line["summary"].startswith("An expanding core")


def test_it_passes_the_kit_from_an_empty_folder(python, tmp_path) -> None:
    kit = ("-m", "pytest", "--pyargs", "remat.testing", "--solver=core", "-q")
    printed = output(python, *kit, "-p", "no:cacheprovider", cwd=tmp_path)
    assert " passed" in printed
    assert "failed" not in printed


def test_it_plans_a_model(python, tmp_path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    asked = ("model.py:mlp", "--budget", "0.4", "--json", "--solver", "core")
    core = json.loads(remat(python, "plan", *asked, cwd=tmp_path))
    assert core["saved_bytes"] <= core["capacity"]
    space: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL), space)
    assert core["recompute_cost"] <= plan(capture(*space["mlp"]()), 0.4, "dp").recompute_cost


def test_it_is_foreign_and_may_be_isolated(python, tmp_path) -> None:
    script = (
        "import remat; from remat.plugins import registry; from remat.solvers import run\n"
        "solver = registry().solver('core', isolation='foreign')\n"
        "problem = remat.KnapsackProblem((3, 4, 5), (3, 4, 6), 8)\n"
        "print(registry().is_foreign('core'), type(solver).__name__, run(solver, problem).saved)\n"
    )
    assert output(python, "-c", script, cwd=tmp_path) == "True IsolatedCore (0, 2)\n"


def test_our_own_environment_does_not_have_it() -> None:
    done = subprocess.run([sys.executable, "-c", "import remat_core_solver"], capture_output=True)
    assert done.returncode != 0
