"""Exports of a step: what other tools read is what the plan tells."""

from __future__ import annotations

import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

import remat
from remat.errors import PlanError, ProblemError
from remat.graph.memory.liveness import StorageKind
from remat.report.exports import COLUMNS, FORMATS


@pytest.fixture(params=["simulated", "peak", "compiled"])
def any_plan(request: pytest.FixtureRequest, plan: remat.Plan, peak_plan: remat.Plan) -> remat.Plan:
    """A plan by bytes, one that says in which order things run, and one whose timeline is of kernels."""
    if request.param == "peak":
        return peak_plan
    if request.param == "compiled":
        return plan.as_compiled(plan.timeline, plan.saved_bytes)
    return plan


def test_the_view_tells_the_figures_of_the_plan(any_plan: remat.Plan) -> None:
    view = any_plan.view
    kept = [v for v in view.values if v.state == "kept"]
    assert sum(v.nbytes for v in kept) == any_plan.saved_bytes == sum(k.nbytes for k in view.kept)
    assert {v.name for v in kept} == {k.name for k in view.kept}
    costs = [run.cost or 0 for run in view.runs]
    assert sum(costs) == any_plan.step_cost + any_plan.recompute_cost
    again = sum(run.cost or 0 for run in view.runs if run.again)
    assert again == any_plan.recompute_cost
    assert len(view.values) == len(any_plan.timeline.lifetimes)


class Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise AssertionError(f"{module}.{name} is not plain")


def test_pytorch_s_memory_viewer_replays_the_step(any_plan: remat.Plan, tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    any_plan.export(path)
    snapshot = Plain(io.BytesIO(path.read_bytes())).load()
    alive: dict[int, int] = {}
    sums = []
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
        sums.append(sum(alive.values()))
    assert max(sums) == any_plan.peak_bytes
    blocks = [b for s in snapshot["segments"] for b in s["blocks"]]
    assert {b["address"]: b["requested_size"] for b in blocks} == alive, "what is left at the end"
    told = _memory_viz.trace(snapshot)
    events = snapshot["device_traces"][0]
    freed = sum(e["action"] == "free_completed" for e in events)
    assert told.count("\ndel ") == told.count("\n# free completed") == freed
    assert f"{len(events)} entries" in told
    assert "<script" in _memory_viz.trace_plot(snapshot)
    assert _memory_viz.segsum(snapshot)
    lines = {(f["filename"], f["line"]) for e in events for f in e["frames"]}
    assert any(file == "blocks.py" and line > 0 for file, line in lines)


def test_a_chrome_trace_has_the_peak_and_the_time_of_the_step(
    any_plan: remat.Plan, tmp_path: Path
) -> None:
    path = tmp_path / "step.json"
    any_plan.export(path)
    events = json.loads(path.read_text())["traceEvents"]
    counted = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert counted == list(any_plan.timeline.nbytes())
    slices = [e for e in events if e["ph"] == "X"]
    total = sum(e["args"]["cost_ps"] for e in slices)
    assert total == any_plan.step_cost + any_plan.recompute_cost
    assert sum(e["dur"] for e in slices) == pytest.approx(total / 10**6)
    again = sum(e["args"]["cost_ps"] for e in slices if e["tid"] == 3)
    assert again == any_plan.recompute_cost
    assert {e["tid"] for e in slices} == {1, 2, 3}
    times = [e["ts"] for e in events if e["ph"] == "C"]
    assert times == sorted(times)


def test_without_costs_a_run_is_a_microsecond(joint: remat.JointGraph, tmp_path: Path) -> None:
    view = remat.plan(joint, 0.4, cost="unit").view
    data = json.loads(FORMATS[".json"](view))
    assert data["otherData"]["unit"] == view.unit != "ps"
    assert all(e["dur"] in (0, 1) for e in data["traceEvents"] if e["ph"] == "X")


def test_node_data_for_model_explorer(plan: remat.Plan, tmp_path: Path) -> None:
    """The form is that of its `GraphNodeData`: results by node id, each a number with colors."""
    path = tmp_path / "step.nodes.json"
    plan.export(path)
    ((graph, data),) = json.loads(path.read_text()).items()
    assert graph == plan.graph
    assert set(data) == {"results", "name"}
    names = {k.name for k in plan.view.kept} | set(plan.recomputed)
    assert set(data["results"]) == names
    for result in data["results"].values():
        assert set(result) == {"value", "bgColor", "textColor"}
        assert isinstance(result["value"], int)


def test_a_csv_of_values(plan: remat.Plan, tmp_path: Path) -> None:
    path = tmp_path / "values.CSV"
    plan.export(path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == len(plan.timeline.lifetimes)
    kept = [row for row in rows if row["state"] == "kept"]
    assert sum(int(row["bytes"]) for row in kept) == plan.saved_bytes
    assert {row["kind"] for row in kept} == {str(StorageKind.SAVED)}
    recomputed = {row["name"] for row in rows if row["state"] == "recomputed"}
    assert recomputed
    assert recomputed <= set(plan.recomputed)


def test_exports_tell_what_is_offloaded(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, remat.Peak(0.3), cost="roofline:epyc", offload="100TB/s")
    sent = {value.name: value.nbytes for value in plan.offloads}
    assert sent, "the exports show something that is offloaded"
    view = plan.view
    away = [v for v in view.values if v.state == "offloaded"]
    boundary = view.timeline.boundary
    assert {v.name: v.nbytes for v in away if v.first < boundary} == sent
    back = [v for v in away if v.first >= boundary]
    assert sum(v.nbytes for v in back) == sum(sent.values())
    assert {v.op for v in back} == {"remat.reload"}
    (told,) = json.loads(FORMATS[".nodes.json"](view)).values()
    violet = {name for name, row in told["results"].items() if row["bgColor"] == "#7a4f9e"}
    assert violet == sent.keys()


def test_what_cannot_be_exported_is_an_error(plan: remat.Plan, tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"its suffix is '.svg'; expected .pickle"):
        plan.export(tmp_path / "step.svg")
    with pytest.raises(PlanError, match="cannot be written: No such file or directory"):
        plan.export(tmp_path / "nowhere" / "step.csv")
    with pytest.raises(PlanError, match="read from a file"):
        remat.Plan.from_json(plan.to_json()).export(tmp_path / "step.csv")
    assert list(tmp_path.iterdir()) == []
