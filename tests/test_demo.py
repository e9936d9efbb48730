"""The demo in small: it runs as a script and ends well."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import remat

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--layers", "1", "--hidden", "64", "--seq", "32", "--lower", "eager")


def test_the_demo_agrees_with_eager_and_holds_what_it_planned() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *SMALL],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "The step agrees with eager PyTorch" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "planned:" in line]
    assert len(rows) == 2
    for row in rows:  # "remat, budget 0.3  12.3 KiB  20.3% of eager  planned: 12.3 KiB"
        at = row.index("planned:")
        assert row[at + 1 : at + 3] == row[3:5]


@pytest.mark.parametrize("worst", [1.0, math.nan])
def test_the_demo_fails_when_the_step_differs(
    worst: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(remat, "compare", functools.partial(remat.compare, solvers=("greedy",)))
    demo = importlib.import_module("demo")
    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: worst)
    try:
        with warnings.catch_warnings():
            assert demo.main(list(SMALL)) == 1
    finally:
        logging.disable(logging.NOTSET)
        for name in ("demo", "models"):
            del sys.modules[name]
    assert "differs from eager" in capsys.readouterr().out
