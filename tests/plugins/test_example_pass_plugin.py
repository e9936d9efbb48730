"""The passes in ``examples`` as a stranger has them: installed, listed, named in pipelines, at work."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.stranger import COMMAND, output

MODEL = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)).tanh())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(32, 8)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return torch.cumsum(self.head(x).sin(), 1).exp().sum()

    def net():
        return Net(), (torch.randn(16, 32),), {}
"""


def pipeline(first: str = "") -> str:
    """A whole pipeline with passes of the plugin's near its beginning."""
    return f"dce,cse,{first}cleanup-recompute-tags,min-cut,partition,functionalize-rng,reorder-backward"


PIPELINES = {
    "plain": pipeline(),
    "all": pipeline("checkpoint-layers,"),
    "but one": pipeline("checkpoint-layers(keep-last=1),"),
    "more than there are": pipeline("checkpoint-layers(keep-last=9),"),
    "no such layer": pipeline("checkpoint-layers(match=blocks.*),"),
    "tagged too late": pipeline().replace("min-cut", "checkpoint-layers,min-cut"),
}

#: Plans by each pipeline, or says why it is refused; fails where text and pipeline differ.
PLANNED = """
    import remat

    def planned(pipelines):
        model, args, _ = net()
        joint, found = remat.capture(model, args, lower="eager"), {}
        for name, text in pipelines.items():
            try:
                manager = remat.PassManager.parse(text)
                assert str(manager) == text, str(manager)
                plan = remat.plan(joint, pipeline=manager)
                found[name] = [plan.saved_bytes, plan.saved, plan.recomputed]
            except remat.RematError as error:
                found[name] = str(error)
        return found
"""
SCRIPT = """
    import json, sys
    from remat.plugins import registry

    registry().solver_names()
    found = {"torch with solvers": "torch" in sys.modules}
    from model import planned

    found["listed"] = json.loads(command("passes", "--json"))
    found["opt"] = command("opt", "model.py:net", "--passes", "dce,checkpoint-layers")
    print(json.dumps(found | planned(json.loads(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def plans(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of each pipeline with the plugin: saved bytes, what is saved, what is recomputed."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(textwrap.dedent(MODEL) + textwrap.dedent(PLANNED))
    script = COMMAND + textwrap.dedent(SCRIPT)
    found = json.loads(output(python, "-c", script, json.dumps(PIPELINES), cwd=folder))
    assert isinstance(found, dict)
    return found


def test_its_pass_and_its_analysis_are_listed(plans: dict[str, Any]) -> None:
    listed = plans["listed"]
    (line,) = [entry for entry in listed["passes"] if entry["name"] == "checkpoint-layers"]
    assert line["options"] == {"match": "*layers.*", "keep-last": "0"}
    assert list(line["not_after"]) == ["cleanup-recompute-tags"]
    assert "layers" in [entry["name"] for entry in listed["analyses"]]


def test_it_changes_what_is_kept(plans: dict[str, Any]) -> None:
    all_bytes, saved, recomputed = plans["all"]
    assert all_bytes < plans["but one"][0] < plans["plain"][0]
    # Inside of the layers everything runs twice; what goes from one to the next is kept.
    assert {"addmm", "addmm_2", "addmm_4"} <= set(recomputed)
    assert {"add", "add_1"} <= set(saved)
    assert "addmm_4" not in plans["but one"][2]


@pytest.mark.parametrize("name", ["more than there are", "no such layer"])
def test_where_nothing_matches_nothing_changes(plans: dict[str, Any], name: str) -> None:
    assert plans[name] == plans["plain"]


def test_it_may_not_stand_where_its_tags_are_not_seen(plans: dict[str, Any]) -> None:
    said = plans["tagged too late"]
    assert "'checkpoint-layers' stands after 'cleanup-recompute-tags': that pass keeps" in said


def test_what_it_says_of_operators_is_heard(plans: dict[str, Any]) -> None:
    """Running sums become cheap: where the planner does not know that, it keeps them."""
    space: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL) + textwrap.dedent(PLANNED), space)
    without = space["planned"]({"plain": pipeline(), "all": PIPELINES["all"]})
    assert "cumsum" in without["plain"][1]
    assert "cumsum" not in plans["plain"][1]
    assert "no pass is called 'checkpoint-layers'" in without["all"]


def test_remat_opt_runs_it(plans: dict[str, Any]) -> None:
    tagged = [line for line in plans["opt"].splitlines() if ", must_recompute, region(" in line]
    assert len(tagged) >= 3 * 5
    regions = {name for line in tagged for name in re.findall(r"region\(\d+\)", line)}
    assert regions == {f"region({k})" for k in range(3)}


def test_it_brings_no_torch_to_who_asks_for_solvers(plans: dict[str, Any]) -> None:
    assert plans["torch with solvers"] is False
