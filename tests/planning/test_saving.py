"""Plans, sets of plans and frontiers as files and as text on a screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError
from remat.planning.reading.plan_text import MOST_SHOWN
from tests.graphs import joint_of


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(12)]
    return joint_of(nn.Sequential(*layers), torch.randn(64, 16))


def test_a_plan_is_what_was_saved(joint: remat.JointGraph, tmp_path: Path) -> None:
    plan, target = remat.plan(joint, 0.3), tmp_path / "plan.json"
    plan.save(target)
    assert target.read_text() == plan.to_json()
    assert remat.Plan.load(str(target)).to_json() == plan.to_json()
    both = remat.PlanSet(plans=(plan, plan), passed_bytes=0, capacity=plan.capacity)
    both.save(target)
    assert remat.PlanSet.load(target).to_json() == both.to_json()
    with pytest.raises(PlanError, match=r"plan\.json' cannot be read: this is not a saved plan"):
        remat.Plan.load(target)
    with pytest.raises(PlanError, match=r"plan '.*' cannot be written: "):
        plan.save(tmp_path / "missing" / "plan.json")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_what_is_no_plan_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"plan '.*' cannot be read: ") as caught:
        remat.Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_a_frontier_is_saved_and_fits_a_screen(joint: remat.JointGraph, tmp_path: Path) -> None:
    found = remat.frontier(joint, "lagrangian")
    found.save(tmp_path / "frontier.json")
    assert (tmp_path / "frontier.json").read_text() == found.to_json()
    assert len(found.points) > MOST_SHOWN
    lines = repr(found).splitlines()
    assert len(lines) <= MOST_SHOWN + 2
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"<frontier of {found.graph} by saved: {len(found.points)} points")
    assert sum(line.endswith("knee") for line in lines) == 1
    assert lines[-1] == f"  and {len(found.points) - len(lines) + 2} more between them>"


def test_a_set_of_many_plans_fits_a_screen(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0.3)
    many = remat.PlanSet(plans=(plan,) * 40, passed_bytes=0, capacity=plan.capacity)
    lines = repr(many).splitlines()
    assert len(lines) < 24
    assert "40 graphs" in lines[0]
    assert lines[-1] == f"  and {40 - len(lines) + 2} more>"


@pytest.mark.parametrize("name", ["step_cost", "without_peak_bytes", "without_cost", "peak_bytes"])
def test_figures_that_cannot_be_are_refused(joint: remat.JointGraph, name: str) -> None:
    text = remat.plan(joint, 0.3).to_json()
    for value in (-5, 10**400):
        with pytest.raises(PlanError, match=f"{name} is "):
            remat.Plan.from_json(re.sub(rf'"{name}": \d+', f'"{name}": {value}', text))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("capacity", 10**30, r"0 or more, and less than 2\*\*63"),
        ("items", -1, "0 or more"),
        ("link", "pigeon", "a rate such as '25 GB/s', one of pcie4,"),
        ("link", "measured", "a rate such as"),
    ],
)
def test_an_edited_plan_is_refused_by_field(
    joint: remat.JointGraph, name: str, value: object, expected: str
) -> None:
    data = json.loads(remat.plan(joint, 0.3).to_json()) | {name: value}
    with pytest.raises(PlanError, match=f"{name} is {value!r}, expected {expected}"):
        remat.Plan.from_json(json.dumps(data))
