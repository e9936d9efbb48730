"""The keys of caches: whatever takes part in a plan is in them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import remat
from remat.plugins import isolated, registry
from remat.plugins.identity import identity, is_known_elsewhere, surroundings
from remat.solvers.knapsack.dp import DynamicProgram
from remat.solvers.knapsack.greedy import Greedy
from tests.plugins.test_registry import plugin

PASS = """
    from dataclasses import dataclass
    from typing import ClassVar

    import remat
    from remat.passes.core.state import PassResult

    @dataclass(frozen=True)
    class Mine(remat.Pass):
        name: ClassVar[str] = "mine"

        def run(self, state):
            return PassResult(state=state, modified=False)

    @remat.hookimpl
    def remat_passes():
        return [Mine]
"""
KEY = """
    import json, os, sys
    from pathlib import Path
    from remat.plugins import registry
    from remat.plugins.identity import surroundings

    for code in json.loads(sys.argv[1]):
        if os.fork():
            os.wait()
            continue
        Path("acme_passes.py").write_text(code)
        import acme_passes
        registry().register(acme_passes)
        print(json.dumps(surroundings(), sort_keys=True), flush=True)
        os._exit(0)
"""


def test_a_registered_plugin_changes_the_key_and_takes_the_change_along() -> None:
    before = surroundings()
    with registry().registered(plugin(type("Other", (Greedy,), {"name": "other"})), "acme"):
        assert surroundings() != before
    assert surroundings() == before


def test_an_edited_pass_of_a_plugin_is_another_key(tmp_path: Path) -> None:
    def keys(*codes: str) -> list[str]:
        """Return the keys of processes, each with a pass of its own."""
        given = json.dumps([textwrap.dedent(code) for code in codes])
        done = subprocess.run(
            [sys.executable, "-B", "-c", textwrap.dedent(KEY), given],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    (first,) = keys(PASS)
    assert is_known_elsewhere(json.loads(first))
    again, edited = keys(PASS, PASS.replace("modified=False", "modified=True"))
    assert again == first != edited


@pytest.mark.parametrize("wrap", [lambda solver: solver, isolated])
def test_options_of_a_solver_are_part_of_its_identity(wrap) -> None:
    one, two = (identity(wrap(DynamicProgram(steps=n))) for n in (10, 20))
    assert one != two
    assert one == identity(DynamicProgram(steps=10))


def test_a_solver_given_to_pytorchs_partitioner_is_known_by_its_options() -> None:
    keys = {remat.torch_solver(DynamicProgram(steps=n)).uuid() for n in (10, 20)}
    assert len(keys) == 2
