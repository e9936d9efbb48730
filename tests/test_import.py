"""`import remat` is quick: neither torch nor a solver's back end comes with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ortools", "scipy", "pulp", "networkx", "numpy", "transformers", "matplotlib")


def imported_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after some code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    "code",
    [
        "import remat",
        "import remat; dir(remat); remat.Solver; remat.KnapsackProblem; remat.RematError",
        "import remat.cli",
        "import remat.testing.plugin",
    ],
)
def test_neither_torch_nor_a_back_end_is_imported(code: str) -> None:
    loaded = imported_by(code)
    assert "remat" in loaded
    assert not loaded & set(HEAVY)


def test_solvers_are_listed_without_torch() -> None:
    loaded = imported_by("import remat; assert len(remat.solver_names()) >= 5")
    assert not loaded & {"torch", "scipy", "ortools", "highspy"}


def test_every_public_name_can_be_had() -> None:
    import remat

    for name in remat.__all__:
        assert getattr(remat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'") as raised:
        _ = remat.nonsense
    assert raised.value.obj is remat, "Python then suggests the nearest name"
