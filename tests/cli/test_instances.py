"""``remat capture`` and ``remat solve``: problems as files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import remat
from remat.cli import main, models
from remat.solvers.graph_problem import GraphProblem, evaluate

MODELS = '''
import torch

def mlp():
    with torch.device("meta"):
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
    return torch.nn.Sequential(*layers), (torch.zeros(8, 64),)
'''  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a knapsack in it."""
    (tmp_path / "some_mlp.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    problem = remat.KnapsackProblem(weights=(6, 5, 5), values=(9, 7, 6), capacity=10)
    items = remat.Instance(name="three", problem=problem, cost="flops", unit="FLOP")
    remat.save_instance(tmp_path / "three.json", items)
    return tmp_path


def run(*args: str) -> Result:
    """A command that does not tell its stages; what it tells of them has tests of its own."""
    return CliRunner().invoke(main, [*args, "--quiet"])


def test_capture_writes_the_problem_that_planning_comes_down_to(folder: Path) -> None:
    done = run("capture", "some_mlp.py:mlp", "-o", "mlp.json", "--cost", "flops")
    assert done.exit_code == 0, done.output
    assert "instance written to mlp.json" in done.stdout
    made = remat.load_instance("mlp.json")
    example = models.load("some_mlp.py:mlp")
    joint = remat.capture(example.model, example.args)
    plan = remat.plan(joint, 1.0, cost="flops")
    assert (made.name, made.cost, made.unit) == ("mlp", "flops", "FLOP")
    assert made.source == "some_mlp.py:mlp; inductor lowering"
    assert made.problem == remat.instance(joint, "flops").problem
    assert (made.full_bytes, made.least_bytes) == (plan.full_bytes, plan.least_bytes)
    saved = [made.problem.names.index(name) for name in plan.saved]
    assert evaluate(made.problem, saved).saved_bytes == plan.saved_bytes


def test_capture_for_machines_tells_the_figures(folder: Path) -> None:
    options = ("--lower", "eager", "--name", "small", "--json")
    done = run("capture", "some_mlp.py:mlp", *options, "--output", "mlp.json")
    assert done.exit_code == 0, done.output
    told, made = json.loads(done.stdout), remat.load_instance("mlp.json")
    assert made.name == told["name"] == "small"
    assert told["nodes"] == len(made.problem)
    assert told["edges"] == sum(map(len, made.problem.inputs))
    assert told["file"] == "mlp.json"
    assert told["candidates"] > 0
    assert done.stderr == ""  # nothing moves where nobody looks


def test_the_same_step_gives_the_same_bytes(folder: Path) -> None:
    for name in ("a.json", "b.json"):
        assert run("capture", "some_mlp.py:mlp", "--name", "m", "-o", name).exit_code == 0
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


def test_solve_gives_the_checked_answer_of_a_knapsack() -> None:
    done = run("solve", "three.json", "--solver", "cpsat", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["saved"] == [1, 2]
    assert told["saved_bytes"] == told["capacity"] == 10
    assert told["recompute_cost"] == told["recompute_bound"] == 9
    assert told["status"] == "optimal"
    assert (told["solver"], told["unit"], told["budget"]) == ("cpsat", "FLOP", None)


@pytest.mark.parametrize(
    ("budget", "capacity", "saved"),
    [("0.4", 6, [0]), ("11", 11, [0, 1]), ("saved:11", 11, [0, 1]), ("1.0", 16, [0, 1, 2])],
)
def test_a_budget_of_a_knapsack_is_a_ratio_or_bytes(
    budget: str, capacity: int, saved: list[int]
) -> None:
    done = run("solve", "three.json", "--solver", "cpsat", "--budget", budget, "--json")
    told = json.loads(done.stdout)
    assert (told["capacity"], told["saved"]) == (capacity, saved)


def test_solve_gives_the_checked_answer_of_a_graph() -> None:
    assert run("capture", "some_mlp.py:mlp", "-o", "mlp.json").exit_code == 0
    made = remat.load_instance("mlp.json")
    assert isinstance(made.problem, GraphProblem)
    done = run("solve", "mlp.json", "--solver", "greedy", "--budget", "0.6", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    scored = evaluate(made.problem, told["saved"])
    assert told["capacity"] == (made.full_bytes or 0) * 6 // 10
    assert scored.saved_bytes == told["saved_bytes"] <= told["capacity"]
    assert scored.recompute_cost == told["recompute_cost"] >= told["recompute_bound"]
    assert [made.problem.names[i] for i in told["saved"]] == told["saved_names"]
    shown = run("solve", "mlp.json")
    assert shown.exit_code == 0, shown.output
    assert f"graph of {len(made.problem):,} nodes" in shown.stdout
    assert "1 → " in shown.stdout
    assert "decided by" in shown.stdout


def test_a_budget_below_the_least_of_a_graph_is_1_and_names_the_least() -> None:
    problem = GraphProblem(
        names=("x", "y"),
        inputs=((), (0,)),
        cost=(0, 5),
        size=(0, 4096),
        savable=(True, True),
        recomputable=(False, False),
        in_forward=(True, True),
        needed=(1,),
        unit="op",
    )
    made = remat.Instance(
        name="g", problem=problem, full_bytes=4096, least_bytes=4096, unit="op", cost="unit"
    )
    remat.save_instance("g.json", made)
    done = run("solve", "g.json", "--budget", "4095")
    assert done.exit_code == 1
    assert "must save at least 4096 bytes" in done.stderr
    done = run("solve", "g.json", "--budget", "0.0", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["saved"] == [1]


def test_solve_tells_people_what_came_out() -> None:
    done = run("solve", "three.json", "--solver", "greedy", "--time-limit", "5")
    assert done.exit_code == 0, done.output
    assert "knapsack of 3 items, 16 B in all" in done.stdout
    assert "of the file → 10 B" in done.stdout
    assert "greedy in " in done.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"remat_instance":1,"kind":"gr', "no JSON, or it is cut off"),
        ('{"remat_instance":9}', "version 9; this remat reads version 1: update remat"),
        ("", "no JSON, or it is cut off"),
    ],
)
def test_a_file_without_an_instance_is_1(folder: Path, text: str, says: str) -> None:
    (folder / "bad.json").write_text(text)
    told = run("solve", "bad.json", "--json")
    assert told.exit_code == 1, told.output
    assert says in json.loads(told.stdout)["error"]["message"]
    done = run("solve", "bad.json")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: instance 'bad.json' cannot be read: ")
    assert says in line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["solve", "none.json"], "does not exist"),
        (["solve", "."], "is a directory"),
        (["solve", "three.json", "--solver", "gredy"], "did you mean 'greedy'?"),
        (["solve", "three.json", "--budget", "-1"], "expected bytes of the step's peak"),
        (["solve", "three.json", "--budget", "peak:0.5"], "one for plans"),
        (["capture", "some_mlp.py:mlp"], "--output"),
        (["capture", "some_mlp.py:mlp", "-o", "nowhere/x.json"], "there is no folder"),
        (["capture", "some_mlp.py:mlp", "-o", "."], "is a directory"),
        (["capture", "some_mlp.py:mpl", "-o", "x.json"], "did you mean 'mlp'?"),
        (["capture", "some_mlp.py:mlp", "-o", "x.json", "--cost", "flop"], "did you mean 'flops'?"),
    ],
)
def test_wrong_usage_is_2(args: list[str], says: str, folder: Path) -> None:
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert not (folder / "x.json").exists()


def test_a_failed_capture_leaves_the_old_file(folder: Path) -> None:
    (folder / "some_mlp.py").write_text("def f():\n    raise ValueError('no model today')\n")
    (folder / "x.json").write_text("before")
    done = run("capture", "some_mlp.py:f", "-o", "x.json")
    assert done.exit_code == 1
    assert "no model today" in done.stderr
    assert (folder / "x.json").read_text() == "before"


def test_solving_a_file_for_machines_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys\n"
        "from remat.cli import main\n"
        "main(['solve', 'three.json', '--solver', 'greedy', '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["saved_bytes"] <= 10


def test_solve_reads_published_graphs(tmp_path: Path) -> None:
    graph = {
        "graph": {},
        "nodes": [{"id": i, "duration": 2, "out_cost": 8 if i in (1, 2) else 1} for i in range(6)],
        "links": [{"0": a, "1": b} for a, b in ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))],
    }
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph))
    done = run("solve", str(file), "--budget", "0.6", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["kind"], told["status"]) == ("schedule", "optimal")
    assert told["cost"] == told["bound"] == told["once"] == 12
    assert told["peak_bytes"] <= told["capacity"] < told["given_peak_bytes"]
    assert sorted(told["sequence"]) == list(range(6))
    shown = run("solve", str(file), "--budget", "0.6")
    assert "step of 6 nodes, 6 edges" in shown.stdout
    assert "0.00% of all once" in shown.stdout
    refused = run("solve", str(file), "--budget", "4B")
    assert refused.exit_code == 1
    assert "every one has at least 9" in refused.output
