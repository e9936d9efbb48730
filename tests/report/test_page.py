"""Pages: their figures are those of the plan, and they load nothing. What a browser shows: `test_page_in_chromium`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError, ProblemError
from remat.units import format_bytes, format_cost
from tests.graphs import joint_of

pytest.importorskip("bokeh")


def read(path: Path, part: str) -> Any:
    """One of the JSON documents in a page."""
    found = re.search(
        rf'<script type="application/json" id="{part}">(.*?)</script>', path.read_text()
    )
    assert found is not None
    return json.loads(found[1])


def test_a_page_has_the_figures_of_its_plans(
    joint: remat.JointGraph, plan: remat.Plan, tmp_path: Path
) -> None:
    frontier, path = remat.frontier(joint), tmp_path / "plan.html"
    frontier.explore(path, plan)
    figures, data = read(path, "figures"), read(path, "data")
    saved = json.loads(plan.to_json())
    assert figures["plan"].items() <= saved.items()
    assert figures["frontier"] == json.loads(frontier.to_json())
    assert len(data["stops"]) == len(figures["plans"]) > 2
    for stop, told in zip(data["stops"], figures["plans"], strict=True):
        cards = {name: (value, beside) for name, value, beside in stop["cards"]}
        assert cards["Peak"][0] == format_bytes(told["peak_bytes"])
        assert cards["Kept for backward"][0] == format_bytes(told["saved_bytes"])
        assert cards["Recomputed"][0] == format_cost(told["recompute_cost"], told["unit"])
        step = told["step_cost"] + told["recompute_cost"]
        assert cards["Step, modelled"][0] == format_cost(step, told["unit"])
        assert max(stop["columns"]["nbytes"]) == stop["peak"]["nbytes"] == told["peak_bytes"]
        kept = [
            b for b, k in zip(stop["values"]["bytes"], stop["values"]["kept"], strict=True) if k
        ]
        assert sum(kept) == told["saved_bytes"]
        assert sum(stop["again"]["cost"]) == told["recompute_cost"]
    assert figures["plans"][data["start"]] == figures["plan"]
    costs = [p["recompute_cost"] for p in figures["plans"]]
    assert costs == sorted(costs, reverse=True), "the slider goes from less memory to less cost"


def test_a_page_loads_nothing_and_texts_of_the_user_are_text(
    plan: remat.Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    plan.explore(path, title="a < b </script><script>alert(1)</script>")
    text = path.read_text()
    assert "<script>alert" not in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(http|//)", text)
    assert "@import" not in text


def test_without_a_frontier_the_page_says_why_there_is_no_slider(
    joint: remat.JointGraph, plan: remat.Plan, tmp_path: Path
) -> None:
    saved = remat.Plan.from_json(plan.to_json())
    path = tmp_path / "plan.html"
    with pytest.raises(PlanError, match=r"read from a file.*remat.plan\(joint, plan=plan\)"):
        saved.explore(path)
    remat.plan(joint, plan=saved).explore(path)
    text = path.read_text()
    assert 'type="range"' not in text
    assert "There is no slider, because the page has one plan" in text
    assert read(path, "figures")["frontier"] is None


def test_long_steps_are_drawn_in_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, joint: remat.JointGraph) -> None:  # fmt: skip
    monkeypatch.setattr("remat.report.page_data.COLUMNS", 10)
    monkeypatch.setattr("remat.report.page_data.MOST_KEPT", 2)
    plan = remat.plan(joint, 0.9)
    path = tmp_path / "plan.html"
    plan.explore(path)
    data = read(path, "data")
    (stop,) = data["stops"]
    assert len(stop["columns"]["x"]) == 10
    assert max(stop["columns"]["nbytes"]) == plan.peak_bytes
    assert sum(stop["values"]["kept"]) == 2
    assert "Not listed:" in data["texts"][stop["keptText"]]


def test_what_cannot_be_drawn_or_written_is_an_error(
    joint: remat.JointGraph, plan: remat.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = remat.frontier(joint, cost="flops")
    with pytest.raises(ProblemError, match="of another graph or cost model"):
        other.explore(tmp_path / "plan.html", plan)
    with pytest.raises(PlanError, match="cannot be written: No such file or directory"):
        plan.explore(tmp_path / "nowhere" / "plan.html")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(PlanError, match=r"not installed; pip install 'remat\[explore\]'"):
        plan.explore(tmp_path / "plan.html")


def test_exposed_transfer_time_is_in_the_figures_of_the_page(tmp_path: Path) -> None:
    """Each point of the frontier has a stop, and the step takes the time of copies too."""
    options: Any = {"cost": "roofline:epyc", "offload": "25GB/s"}
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    joint = joint_of(model, torch.randn(1024, 512))
    frontier = remat.frontier(joint, by="peak", **options)
    plan = remat.plan(joint, remat.Peak(0.1), **options)
    assert plan.exposed_time > 0
    frontier.explore(tmp_path / "page.html", plan)
    data = read(tmp_path / "page.html", "data")
    step = plan.before_after.step_cost + plan.recompute_cost + plan.exposed_time
    shown = [stop["cards"][1][1] for stop in data["stops"]]
    assert format_cost(step, plan.unit) in shown
    assert len(shown) >= len({p.peak_bytes for p in frontier.points})
