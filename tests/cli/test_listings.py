"""The commands that list what is registered, and what was refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

import remat
from remat.cli import main
from remat.plugins.registry import PluginWarning, registry
from tests.cli.models import BLOCK, folder_with

MODELS = BLOCK + '''
def blocks():
    return torch.nn.Sequential(Block(), Block()), (torch.randn(64, 16),)
'''  # fmt: skip
MODEL = "listed_blocks.py:blocks"
folder = folder_with("listed_blocks", MODELS)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, [*args, "--quiet"])


@pytest.mark.parametrize("command", ["solvers", "passes", "costs"])
def test_listings_name_all_that_is_registered(command: str) -> None:
    known = {
        "solvers": registry().solvers,
        "passes": registry().passes,
        "costs": registry().cost_models,
    }[command]
    shown, machine = run(command), run(command, "--json")
    assert shown.exit_code == machine.exit_code == 0
    entries = json.loads(machine.stdout)[command]
    assert [entry["name"] for entry in entries] == list(known)
    for entry in entries:
        assert entry["name"] in shown.stdout
        assert entry["summary"] in shown.stdout


def test_solvers_tell_why_one_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry().solvers["cpsat"]
    monkeypatch.setattr(kind, "requires", ("no_such_module",))
    monkeypatch.setattr(kind, "extra", "remat[things]", raising=False)
    assert "pip install 'remat[things]'" in run("solvers").stdout
    entry = {e["name"]: e for e in json.loads(run("solvers", "--json").stdout)["solvers"]}["cpsat"]
    assert entry["available"] is False
    assert "no_such_module" in entry["reason"]
    refused = run("plan", MODEL, "--solver", "cpsat")
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
