"""The demo in small: it runs as a script and ends well."""

from __future__ import annotations

import importlib
import logging
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--layers", "1", "--hidden", "64", "--seq", "32", "--lower", "eager", "--budget", "8.5MiB")


def test_the_demo_tells_the_step_before_and_after(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *SMALL],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "The step agrees with eager PyTorch" in done.stdout
    rows = {line.strip().partition("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["peak, measured"][-1].startswith("-"), "less memory, as the allocator tells it"
    for name in ("step, median", "step, modelled"):
        *_, old, ms, new, same, share, change, unit = rows[name]
        assert ms == same == unit == "ms", "what is planned and what is measured have one unit"
        assert float(new) - float(old) == pytest.approx(float(change), abs=0.11)
        assert share.endswith("%,")
    assert "quartiles" in rows
    assert rows["cost model"][-1] == "roofline:epyc", "the device that the demo runs on"
    picture = tmp_path / "remat-demo.svg"
    assert f"drawn: {picture}" in done.stdout
    assert "<svg" in picture.read_text()
    steps = done.stdout.partition("What to do next")[2].splitlines()[1:]
    assert len(steps) == 3
    assert all("remat" in step for step in steps)
    assert "Llama, 1 layers" in picture.read_text(), "the title is the model"


def test_the_demo_fails_when_the_step_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    demo = importlib.import_module("demo")
    monkeypatch.setattr(demo, "SOLVERS", ("greedy",))
    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: math.nan)
    try:
        with warnings.catch_warnings():
            assert demo.main(list(SMALL)) == 1
    finally:
        logging.disable(logging.NOTSET)
        for name in ("demo", "models"):
            del sys.modules[name]
    assert "differs from eager" in capsys.readouterr().out
