"""What lies in the working directory is imported where an argument names it, and in nobody's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import remat
from remat.experiments.table import Sweep

ROOT = Path(__file__).parents[2]
#: Modules that commands import, one of which is not installed.
NAMES = (
    "torch", "numpy", "scipy", "filelock", "click", "rich", "socket", "secrets", "multiprocessing",
    "remat_missing_backend",
)  # fmt: skip
HOSTILE = 'from pathlib import Path\n\nPath(__file__).with_suffix(".ran").touch()\n'
MODEL = '''
import torch
from neighbour import WIDTH

def net():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh()), (torch.ones(2, WIDTH),)
'''  # fmt: skip
SOLVER = '''
import remat

class FirstFit(remat.Solver):
    name = "first-fit"

    def solve(self, problem, *, time_limit=None):
        chosen, left = [], problem.capacity
        for k, weight in enumerate(problem.weights):
            if weight <= left:
                chosen.append(k)
                left -= weight
        return remat.Answer(chosen)
'''  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files that are named as installed modules are, and with modules of the user's."""
    made = tmp_path / "downloads"
    made.mkdir()
    for name in NAMES:
        (made / f"{name}.py").write_text(HOSTILE)
    (made / "net.py").write_text(MODEL)
    (made / "neighbour.py").write_text("WIDTH = 4\n")
    (made / "my.py").write_text(SOLVER)
    script = tmp_path / "bin" / "command.py"  # as the command remat is installed
    script.parent.mkdir()
    script.write_text('from remat.cli import main\n\nif __name__ == "__main__":\n    main()\n')
    return made


def run(folder: Path, *args: str) -> str:
    """Runs Python there, where none of the others' files may be run; returns its errors."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "REMAT_CACHE": str(folder.parent / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*.ran"))
    return done.stderr


def test_no_command_runs_what_is_named_as_an_installed_module(folder: Path) -> None:
    """As a module and as a script, in this process and in others."""
    models, solver = ("net.py:net", "net:net"), ("--solvers", "my:FirstFit")
    options = ("--budgets", "0.5", "--lower", "eager", "--jobs", "1", "--json", "-o", "table.jsonl")
    told = run(folder, "-m", "remat", "sweep", *models, *solver, *options)
    assert "planning 2 rows\n" in told
    rows = Sweep.load(folder / "table.jsonl").rows
    assert [(row.model, row.solver) for row in rows] == [(m, "my:FirstFit") for m in models]
    assert all(row.peak_bytes for row in rows)
    problem = remat.KnapsackProblem(weights=(6, 5, 5), values=(9, 7, 6), capacity=10)
    items = remat.Instance(name="three", problem=problem, cost="flops", unit="FLOP")
    remat.save_instance(folder / "three.json", items)
    script = str(folder.parent / "bin" / "command.py")
    run(folder, script, "solve", "three.json", "--solver", "my:FirstFit")


def test_what_no_argument_names_is_not_looked_for_there(folder: Path) -> None:
    """Neither by the command nor by a back end that is not installed."""
    code = (
        "import sys; from remat.cli import main; main(standalone_mode=False)\n"
        "try: import remat_missing_backend\n"
        "except ModuleNotFoundError as error: print(error, file=sys.stderr)"
    )
    assert "No module named 'remat_missing_backend'" in run(folder, "-P", "-c", code, "solvers")


def test_a_solver_in_a_process_of_its_own_imports_what_the_parent_does(folder: Path) -> None:
    code = (
        "import sys; sys.path.append('.')\n"
        "import my, remat\n"
        "from remat.solvers.isolation.process import isolated\n"
        "from remat.solvers.run import run\n"
        "problem = remat.KnapsackProblem([1, 2], [3, 4], 2)\n"
        "assert run(isolated(my.FirstFit()), problem).saved == (0,)\n"
    )
    run(folder, "-P", "-c", code)
