"""Graph text before and after a pipeline, through ``remat opt``; one file for each story.

A file begins with what it shows and with the pipeline; what comes out stands below a line of dashes.
``REMAT_UPDATE_GOLDEN=1 pytest tests/passes/golden`` writes the lower halves anew, to be read.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from remat.cli import main

RULE = "# " + "-" * 40 + "\n"
FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_golden(path: Path) -> None:
    before, _, expected = path.read_text().partition(RULE)
    passes = next(
        line.removeprefix("# passes: ")
        for line in before.splitlines()
        if line.startswith("# passes: ")
    )
    graph = "".join(line for line in before.splitlines(True) if not line.startswith("# "))
    args = ["opt", "-", "--passes", passes, "--verify-each=numbers"]
    done = CliRunner().invoke(main, args, input=graph)
    assert done.exit_code == 0, done.output
    if os.environ.get("REMAT_UPDATE_GOLDEN"):
        path.write_text(before + RULE + done.stdout)
        expected = done.stdout
    assert done.stdout == expected


def test_every_pass_of_ours_has_a_story() -> None:
    from remat.plugins.registry import registry

    told = "".join(path.read_text().partition(RULE)[0] for path in FILES)
    elsewhere = {"agree-ranks", "offload-saved", "saved-tensor-hooks"}
    elsewhere |= {"classify", "dist-from-backward"}  # they change no graph
    ours = {n for n, k in registry().passes.items() if k.__module__.startswith("remat.")}
    assert [n for n in sorted(ours - elsewhere) if n not in told] == []
