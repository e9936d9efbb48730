"""`remat explain` and `remat report`: what they write has the figures that they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from remat.cli import main
from tests.cli.models import BLOCK, folder_with
from tests.report.test_page import read

MODELS = BLOCK + '''
def blocks():
    with torch.device("meta"):
        return torch.nn.Sequential(*(Block() for _ in range(3))), (torch.zeros(512, 16),)

'''  # fmt: skip
MODEL = "explained_blocks.py:blocks"
folder = folder_with("explained_blocks", MODELS)


def run(command: str, *args: str) -> Result:
    return CliRunner().invoke(main, [command, MODEL, "--lower", "eager", "--quiet", *args])


def test_explain_prints_what_plan_explains() -> None:
    found = run("explain", "--budget", "0.4")
    assert found.exit_code == 0, found.output
    assert "plan for" in found.output
    assert "kept activations" in found.output


def test_explain_writes_a_page_and_exports(folder: Path) -> None:
    found = run(
        "explain", "--html", "plan.html", "--export", "s.pickle", "--export", "s.csv", "--json"
    )  # fmt: skip
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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--export", "step.svg"), "its suffix is '.svg'"),
        (("--export", "step.json", "--export-format", "perfetto"), "format is 'perfetto'"),
        (("--html", "nowhere/plan.html"), "there is no folder"),
        (("--html", "plan.txt"), "'plan.txt' ends with '.txt'; expected .html"),
        (("--html", ""), "the name of the file is empty"),
        (("--html", "plan\udcff.html"), "is no text in UTF-8"),
        (("--html", "p.html", "--export", "./p.html", "--export-format", "csv"), "written twice"),
    ],
)
def test_wrong_usage_of_explain_is_known_before_any_work(args: tuple[str, ...], says: str) -> None:
    found = run("explain", *args)
    assert found.exit_code == 2
    assert says in " ".join(found.output.split())


def test_without_bokeh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    found = run("explain", "--html", "plan.html")
    assert found.exit_code == 1
    assert found.output == (
        "error: pages are drawn with Bokeh, which is not installed; pip install 'remat[explore]'\n"
    )


def test_a_report_lies_beside_its_figures(folder: Path) -> None:
    found = run(
        "report", "--budgets", "1,0.5,0.2", "--solvers", "auto,greedy", "-o", "r.html", "--json"
    )
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told == json.loads((folder / "r.json").read_text()) == read(folder / "r.html", "figures")
    assert [p["budget"] for p in told["plans"]] == ["0.2", "0.5", "1"]
    assert len(told["comparison"]["rows"]) == 6
    assert {"remat", "PyTorch", "this machine"} <= set(told["environment"])
    page = (folder / "r.html").read_text()
    for title in ("Solvers side by side", "Versions and hardware", told["environment"]["PyTorch"]):
        assert title in page
    auto = {r["budget"]: r for r in told["comparison"]["rows"] if r["solver"] == "auto"}
    for plan in told["plans"]:
        row = auto[plan["budget"]]
        for name in ("saved_bytes", "recompute_cost", "peak_bytes"):
            assert plan[name] == row[name], (plan["budget"], name)


def test_a_report_tells_which_budget_has_no_plan(folder: Path) -> None:
    asked = ("report", "--solvers", "auto", "-o", "r.html")
    found = run(*asked, "--budgets", "peak:1KiB,0.5,0.5", "--json")
    assert found.exit_code == 0, found.output
    assert [p["budget"] for p in json.loads(found.stdout)["plans"]] == ["0.5"]
    assert "no plan: budget is a peak of 1 KiB" in (folder / "r.html").read_text()
    found = run(*asked, "--budgets", "peak:1KiB")
    assert found.exit_code == 1
    assert found.output.startswith("error: budget is a peak of 1 KiB")


def test_a_report_is_written_with_its_figures_or_not_at_all(folder: Path) -> None:
    (folder / "r.html").write_text("before")
    asked = ("report", "--budgets", "1", "--solvers", "auto", "-o", "r.html")
    (folder / "r.json").write_text('{"mine": 1}')
    found = run(*asked)
    assert found.exit_code == 2
    assert "would replace 'r.json'" in " ".join(found.output.split())
    (folder / "r.json").unlink()
    (folder / "r.json").mkdir()
    assert run(*asked).exit_code == 2
    assert (folder / "r.html").read_text() == "before"
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".py") == ["r.html", "r.json"]


def test_a_report_needs_a_name_of_a_page() -> None:
    found = run("report", "-o", "report.json")
    assert found.exit_code == 2
    assert "expected .html" in " ".join(found.output.split())


def test_explain_offloads_by_peak_only() -> None:
    asked = ("explain", "--offload", "100TB/s", "--cost", "roofline:epyc")
    done = run(*asked, "--budget", "peak:0.2")
    assert done.exit_code == 0, done.output
    assert "over 100000 GB/s" in done.stdout
    refused = run(*asked, "--budget", "peak:0.2", "--html", "p.html", "--by", "bytes")
    assert refused.exit_code == 2
    assert "goes together with '--by peak' or '--by none' only" in refused.output
