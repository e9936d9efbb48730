"""``remat capture`` and ``remat solve``: problems as files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remat
from remat.cli import models
from remat.solvers.graph.problem import GraphProblem, evaluate
from tests.cli.command import run, shown, told


@pytest.fixture(autouse=True)
def knapsack(folder: Path) -> None:
    """A problem of three items in a file."""
    problem = remat.KnapsackProblem(weights=(6, 5, 5), values=(9, 7, 6), capacity=10)
    items = remat.Instance(name="three", problem=problem, cost="flops", unit="FLOP")
    remat.save_instance(folder / "three.json", items)


def test_capture_writes_the_problem_that_planning_comes_down_to() -> None:
    text = shown("capture", "nets.py:block", "-o", "block.json", "--cost", "flops")
    assert re.search("file +block.json", text)
    made = remat.load_instance("block.json")
    example = models.load("nets.py:block")
    joint = remat.capture(example.model, example.args)
    plan = remat.plan(joint, 1.0, cost="flops")
    assert (made.name, made.cost, made.unit) == ("block", "flops", "FLOP")
    assert made.source == "nets.py:block; inductor lowering"
    assert made.problem == remat.instance(joint, "flops").problem
    assert (made.full_bytes, made.least_bytes) == (plan.full_bytes, plan.least_bytes)
    saved = [made.problem.names.index(name) for name in plan.saved]
    assert evaluate(made.problem, saved).saved_bytes == plan.saved_bytes


def test_capture_for_machines_tells_the_figures_and_writes_the_same_bytes_again(
    folder: Path,
) -> None:
    options = ("--lower", "eager", "--json")
    (folder / "again").mkdir()
    done, again = (
        run("capture", "nets.py:block", *options, "--output", name)
        for name in ("a.json", "again/a.json")
    )
    assert done.exit_code == again.exit_code == 0, done.output
    figures, made = json.loads(done.stdout), remat.load_instance("a.json")
    assert made.name == figures["name"] == "a"
    assert figures["nodes"] == len(made.problem)
    assert figures["edges"] == sum(map(len, made.problem.inputs))
    assert figures["file"] == "a.json"
    assert figures["candidates"] > 0
    assert done.stderr == ""  # nothing moves where nobody looks
    assert (folder / "a.json").read_bytes() == (folder / "again" / "a.json").read_bytes()


def test_solve_gives_the_checked_answer_of_a_knapsack() -> None:
    answer = told("solve", "three.json", "--solver", "cpsat")
    assert answer["saved"] == [1, 2]
    assert answer["saved_bytes"] == answer["capacity"] == 10
    assert answer["recompute_cost"] == answer["recompute_bound"] == 9
    assert answer["status"] == "optimal"
    assert (answer["solver"], answer["unit"], answer["budget"]) == ("cpsat", "FLOP", None)


@pytest.mark.parametrize(
    ("budget", "capacity", "saved"),
    [("0.4", 6, [0]), ("11", 11, [0, 1]), ("saved:11", 11, [0, 1]), ("1.0", 16, [0, 1, 2])],
)
def test_a_budget_of_a_knapsack_is_a_ratio_or_bytes(
    budget: str, capacity: int, saved: list[int]
) -> None:
    answer = told("solve", "three.json", "--solver", "cpsat", "--budget", budget)
    assert (answer["capacity"], answer["saved"]) == (capacity, saved)


def test_solve_gives_the_checked_answer_of_a_graph() -> None:
    shown("capture", "nets.py:block", "-o", "block.json", "--lower", "eager")
    made = remat.load_instance("block.json")
    assert isinstance(made.problem, GraphProblem)
    answer = told("solve", "block.json", "--solver", "greedy", "--budget", "0.6")
    scored = evaluate(made.problem, answer["saved"])
    assert answer["capacity"] == (made.full_bytes or 0) * 6 // 10
    assert scored.saved_bytes == answer["saved_bytes"] <= answer["capacity"]
    assert scored.recompute_cost == answer["recompute_cost"] >= answer["recompute_bound"]
    assert [made.problem.names[i] for i in answer["saved"]] == answer["saved_names"]
    text = shown("solve", "block.json")
    for part in (f"nodes +{len(made.problem):,}\n", "budget +1\n", "solver +auto\n"):
        assert re.search(part, text)


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
    assert told("solve", "g.json", "--budget", "0.0")["saved"] == [1]


def test_solve_tells_people_what_came_out() -> None:
    text = shown("solve", "three.json", "--solver", "greedy", "--time-limit", "5")
    rows = dict(re.split("  +", line) for line in text.splitlines() if "  " in line)
    shown_rows = [rows[name] for name in ("items", "total bytes", "capacity", "solver", "saved")]
    assert shown_rows == ["3", "16 B", "10 B", "greedy", "1"]
    assert re.fullmatch(r"0\.\d{3} s", rows["elapsed"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"remat_instance":1,"kind":"gr', "no JSON, or it is cut off"),
        ('{"remat_instance":9}', "version 9; this remat reads version 1: update remat"),
    ],
)
def test_a_file_without_an_instance_is_1(folder: Path, text: str, says: str) -> None:
    (folder / "bad.json").write_text(text)
    machine = run("solve", "bad.json", "--json")
    assert machine.exit_code == 1, machine.output
    assert says in json.loads(machine.stdout)["error"]["message"]
    done = run("solve", "bad.json")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: instance 'bad.json' cannot be read: ")
    assert says in line


def test_a_failed_capture_leaves_the_old_file(folder: Path) -> None:
    (folder / "nets.py").write_text("def f():\n    raise ValueError('no model today')\n")
    (folder / "x.json").write_text("before")
    done = run("capture", "nets.py:f", "-o", "x.json")
    assert done.exit_code == 1
    assert "no model today" in done.stderr
    assert (folder / "x.json").read_text() == "before"


def test_solving_a_file_for_machines_needs_no_torch() -> None:
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
    answer = told("solve", str(file), "--budget", "0.6")
    assert (answer["kind"], answer["status"]) == ("schedule", "optimal")
    assert answer["cost"] == answer["bound"] == answer["once"] == 12
    assert answer["peak_bytes"] <= answer["capacity"] < answer["given_peak_bytes"]
    assert sorted(answer["sequence"]) == list(range(6))
    text = shown("solve", str(file), "--budget", "0.6")
    for part in (
        "kind +schedule",
        "nodes +6",
        "edges +6",
        "cost +12$",
        "bound +12$",
        "cost of each node once +12$",
    ):
        assert re.search(f"^{part}", text, re.MULTILINE)
    refused = run("solve", str(file), "--budget", "4B")
    assert refused.exit_code == 1
    assert "every one has at least 9" in refused.output
