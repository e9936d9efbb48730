"""Two saved plans side by side."""

from __future__ import annotations

import re
from pathlib import Path

import remat
from remat.units import format_cost
from tests.cli.command import run, shown, told


def saved(name: str, *options: str, model: str = "nets.py:blocks") -> remat.Plan:
    shown("plan", model, "--lower", "eager", "--save", name, *options)
    return remat.Plan.load(name)


def test_what_one_keeps_and_the_other_does_not_and_figures_side_by_side() -> None:
    a, b = saved("a.json", "--budget", "0.2"), saved("b.json", "--budget", "0.9")
    (one,) = told("diff", "a.json", "b.json")["graphs"]
    assert one["same_graph"] is True
    assert set(one["only_first"]) == set(a.saved) - set(b.saved)
    assert set(one["only_second"]) == set(b.saved) - set(a.saved)
    assert one["only_second"], "a larger budget keeps more"
    figures = ("saved_bytes", "peak_bytes", "without_peak_bytes", "recompute_cost", "step_cost")
    for side, plan in (("first", a), ("second", b)):
        assert [one[side][name] for name in figures] == [getattr(plan, name) for name in figures]
    text = shown("diff", "a.json", "b.json")
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "0.2" in rows["budget"]
    assert "0.9" in rows["budget"]
    steps = [format_cost(plan.before_after.cost, plan.unit) for plan in (a, b)]
    assert re.split(r"  +", rows["step cost"])[1:] == steps, "recomputation included"
    assert "planned peak bytes" not in rows, "the plan was not compiled"
    assert "kept in b.json only: " in text
    assert "different graphs" not in text
    assert "kept in a.json only: nothing" in shown("diff", "a.json", "a.json")


def test_plans_of_different_graphs_are_told_and_what_is_no_plan_is_an_error() -> None:
    """The error names the file that it is about."""
    saved("a.json")
    saved("c.json", model="nets.py:block")
    assert "the plans are for different graphs" in shown("diff", "a.json", "c.json")
    Path("d.json").write_text("{}")
    done = run("diff", "a.json", "d.json")
    assert done.exit_code == 1
    assert "error: plan 'd.json'" in done.stderr
