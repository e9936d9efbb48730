"""The demo in small: it runs as a script and ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--layers", "1", "--hidden", "64", "--seq", "32", "--lower", "eager")


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *SMALL, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )


def test_the_demo_agrees_with_eager_and_holds_what_it_planned() -> None:
    done = demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "The step agrees with eager PyTorch" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "planned:" in line]
    assert len(rows) == 2
    for row in rows:  # "remat, budget 0.3  12.3 KiB  20.3% of eager  planned: 12.3 KiB"
        at = row.index("planned:")
        assert row[at + 1 : at + 3] == row[3:5]


def test_the_demo_fails_when_the_step_differs(tmp_path: Path) -> None:
    # A wrong tolerance stands for a wrong gradient.
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); sys.argv = ['demo']\n"
        f"import demo; demo.TOLERANCE = -1.0; sys.exit(demo.main({list(SMALL)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs from eager" in done.stdout
