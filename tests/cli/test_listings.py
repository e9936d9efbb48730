"""The commands that list what is registered, and what was refused."""

from __future__ import annotations

import json

import pytest

import remat
from remat.plugins.registry import PluginWarning, registry
from tests.cli.command import run, shown, told


@pytest.mark.parametrize("command", ["solvers", "passes", "costs"])
def test_listings_name_all_that_is_registered(command: str) -> None:
    known = {
        "solvers": registry().solvers,
        "passes": registry().passes,
        "costs": registry().cost_models,
    }[command]
    entries, text = told(command)[command], shown(command)
    assert [entry["name"] for entry in entries] == list(known)
    for entry in entries:
        assert entry["name"] in text
        assert entry["summary"] in text


def test_a_default_that_no_text_expresses_is_left_empty() -> None:
    options = {row["name"]: row["options"] for row in told("passes")["analyses"]}
    assert options["cut"] == {"rules": ""}
    assert options["graph-problem"] == {"cost": "none"}


def test_solvers_tell_why_one_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry().solvers["cpsat"]
    monkeypatch.setattr(kind, "requires", ("no_such_module",))
    monkeypatch.setattr(kind, "extra", "remat[things]", raising=False)
    assert "pip install 'remat[things]'" in shown("solvers")
    entry = {e["name"]: e for e in told("solvers")["solvers"]}["cpsat"]
    assert entry["available"] is False
    assert "no_such_module" in entry["reason"]
    refused = run("plan", "nets.py:blocks", "--solver", "cpsat")
    assert refused.exit_code == 2
    assert "pip install 'remat[things]'" in refused.stderr


class Broken:
    """A plugin that raises when it is asked."""

    @remat.hookimpl
    def remat_solvers(self) -> list[type[remat.Solver]]:
        raise ZeroDivisionError("a plugin in pieces")


def test_a_refused_plugin_is_told_of_and_the_rest_works() -> None:
    with registry().registered(Broken(), "pieces"):
        with pytest.warns(PluginWarning, match="pieces"):
            registry().solvers  # noqa: B018
        done = run("solvers", "--json")
        assert done.exit_code == 0
        assert "ZeroDivisionError" in json.loads(done.stdout)["refused"][0]
        assert "warning: plugin 'pieces' is refused" in done.stderr


def test_the_default_pipeline_is_printed() -> None:
    assert shown("passes", "--pipeline") == f"{remat.default_pipeline()}\n"
    assert told("passes", "--pipeline") == {"pipeline": str(remat.default_pipeline())}


def test_analyses_and_orders_are_listed() -> None:
    text, data = shown("passes"), told("passes")
    assert "not after" in text
    assert "graph-problem" in text
    by_name = {line["name"]: line for line in data["passes"]}
    assert set(by_name["cse"]["not_after"]) == {"min-cut", "knapsack", "solve-graph", "partition"}
    assert (by_name["partition"]["optional"], by_name["dce"]["optional"]) == (False, True)
    analyses = {line["name"]: line for line in data["analyses"]}
    assert set(analyses) == set(registry().analyses)
    assert analyses["cut"]["options"] == {"rules": ""}, "no text of a pipeline names these rules"
    assert "BanRules(" not in text


def test_cost_models_and_their_devices_fit_a_screen() -> None:
    lines = shown("costs").splitlines()
    assert any(line.split() == ["roofline:h100", "H100", "SXM"] for line in lines)
    assert max(map(len, lines)) <= 120
