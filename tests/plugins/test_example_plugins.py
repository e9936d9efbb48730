"""The plugins in ``examples`` as a stranger has them: installed, listed, tested by the kit, at work."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.stranger import COMMAND, environment, output

EXAMPLES = Path(__file__).parents[2] / "examples"
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
#: What the tables say of the plugins, and what their solver and their passes do.
SCRIPT = """
    import json, sys
    import remat
    from remat.plugins import registry
    from remat.solvers import run

    solver = registry().solver("core", isolation="foreign")
    problem = remat.KnapsackProblem((3, 4, 5), (3, 4, 6), 8)
    isolated = type(solver).__name__, run(solver, problem).saved
    found = {"isolated": isolated, "torch with solvers": "torch" in sys.modules}
    from model import planned

    for kind in ("solvers", "passes"):
        found[kind] = json.loads(command(kind, "--json"))
    for name in ("core", "dp"):
        asked = ("--lower", "eager", "--budget", "0.4", "--json", "--solver", name)
        found[name] = json.loads(command("plan", "model.py:net", *asked))
    found["opt"] = command("opt", "model.py:net", "--passes", "dce,checkpoint-layers")
    print(json.dumps(found | planned(json.loads(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with both plugins."""
    folder = tmp_path_factory.mktemp("stranger")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pyc*")
    copies = [
        shutil.copytree(EXAMPLES / name, folder / name, ignore=ignored)
        for name in ("solver_plugin", "pass_plugin")
    ]
    return environment(folder, "--no-build-isolation", *copies)


@pytest.fixture(scope="module")
def found(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script finds; of each pipeline saved bytes, what is saved, what is recomputed."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(textwrap.dedent(MODEL) + textwrap.dedent(PLANNED))
    script = COMMAND + textwrap.dedent(SCRIPT)
    loaded = json.loads(output(python, "-c", script, json.dumps(PIPELINES), cwd=folder))
    assert isinstance(loaded, dict)
    return loaded


def test_solver_pass_and_analysis_are_found_by_their_entry_points(found: dict[str, Any]) -> None:
    (line,) = [entry for entry in found["solvers"]["solvers"] if entry["name"] == "core"]
    assert line["available"]
    assert line["summary"].startswith("An expanding core")
    (line,) = [entry for entry in found["passes"]["passes"] if entry["name"] == "checkpoint-layers"]
    assert line["options"] == {"match": "*layers.*", "keep-last": "0"}
    assert list(line["not_after"]) == ["cleanup-recompute-tags"]
    assert "layers" in [entry["name"] for entry in found["passes"]["analyses"]]


def test_the_solver_passes_the_kit_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    kit = ("-m", "pytest", "--pyargs", "remat.testing", "--solver=core", "-q")
    printed = output(python, *kit, "-p", "no:cacheprovider", cwd=tmp_path)
    assert int(printed.split(" passed")[0].split()[-1]) > 120
    assert "failed" not in printed


def test_the_solver_plans_a_model(found: dict[str, Any]) -> None:
    core = found["core"]
    assert core["saved_bytes"] <= core["capacity"]
    assert core["recompute_cost"] <= found["dp"]["recompute_cost"]


def test_the_solver_is_foreign_and_may_be_isolated_without_torch(found: dict[str, Any]) -> None:
    assert found["isolated"] == ["IsolatedCore", [0, 2]]
    assert found["torch with solvers"] is False


def test_our_own_environment_does_not_have_them() -> None:
    assert importlib.util.find_spec("remat_core_solver") is None
    assert importlib.util.find_spec("remat_layer_passes") is None


def test_it_changes_what_is_kept(found: dict[str, Any]) -> None:
    all_bytes, saved, recomputed = found["all"]
    assert all_bytes < found["but one"][0] < found["plain"][0]
    # Inside of the layers everything runs twice; what goes from one to the next is kept.
    assert {"addmm", "addmm_2", "addmm_4"} <= set(recomputed)
    assert {"add", "add_1"} <= set(saved)
    assert "addmm_4" not in found["but one"][2]


@pytest.mark.parametrize("name", ["more than there are", "no such layer"])
def test_where_nothing_matches_nothing_changes(found: dict[str, Any], name: str) -> None:
    assert found[name] == found["plain"]


def test_it_may_not_stand_where_its_tags_are_not_seen(found: dict[str, Any]) -> None:
    said = found["tagged too late"]
    assert "'checkpoint-layers' stands after 'cleanup-recompute-tags': that pass keeps" in said


def test_what_it_says_of_operators_is_heard(found: dict[str, Any]) -> None:
    """Running sums become cheap: where the planner does not know that, it keeps them."""
    space: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL) + textwrap.dedent(PLANNED), space)
    without = space["planned"]({"plain": pipeline(), "all": PIPELINES["all"]})
    assert "cumsum" in without["plain"][1]
    assert "cumsum" not in found["plain"][1]
    assert "no pass is called 'checkpoint-layers'" in without["all"]


def test_remat_opt_runs_it(found: dict[str, Any]) -> None:
    tagged = [line for line in found["opt"].splitlines() if ", must_recompute, region(" in line]
    assert len(tagged) >= 3 * 5
    regions = {name for line in tagged for name in re.findall(r"region\(\d+\)", line)}
    assert regions == {f"region({k})" for k in range(3)}
