"""`remat explain`: what it writes has the figures that it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.command import run as command
from tests.report.test_page import read


def run(name: str, *args: str, model: str = "nets.py:block") -> Result:
    return command(name, model, "--lower", "eager", *args)


def test_explain_writes_a_page_and_exports(folder: Path) -> None:
    exports = ("--export", "s.pickle", "--export", "s.csv")
    found = run("explain", "--html", "plan.html", *exports, "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told == read(folder / "plan.html", "figures")
    planned = json.loads(run("plan", "--json").stdout)
    assert {k: planned[k] for k in told["plan"]} == {**told["plan"], "solve_s": planned["solve_s"]}
    frontier = json.loads(run("frontier", "--json").stdout)["frontiers"][0]
    assert told["frontier"]["points"] == frontier["points"]
    assert (folder / "s.pickle").stat().st_size
    assert (folder / "s.csv").stat().st_size


def test_explain_without_a_frontier(folder: Path) -> None:
    found = run("explain", "--html", "plan.html", "--by", "none")
    assert found.output == "written: plan.html\n"
    assert read(folder / "plan.html", "figures")["frontier"] is None


def test_without_bokeh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    found = run("explain", "--html", "plan.html")
    assert found.exit_code == 1
    assert found.output == (
        "error: pages are drawn with Bokeh, which is not installed; pip install 'remat[explore]'\n"
    )
