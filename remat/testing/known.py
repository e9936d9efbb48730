"""Known failures: solver tests that a solver's author expects to fail, listed in a file.

Each line has the name of one test, as pytest prints the name after ``::``. Text after ``#`` is the
reason for the failure::

    test_case[beyond-doubles-mine:Mine]   # computes in float64

A listed test that passes fails the run, so the list cannot hide a fixed test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

DEFAULT = "known_failures.txt"


def read(path: Path) -> Mapping[str, str]:
    """Read a file of known failures: one test name per line, with a reason after ``#``.

    Returns:
        The reason why each test fails, by test name.

    Raises:
        pytest.UsageError: the file cannot be read, a line does not name a test, or a test is listed
            twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"--known-failures={path}: {error}") from None
    known: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, _, reason = (part.strip() for part in line.partition("#"))
        if not name:
            continue
        name = name.rpartition("::")[2]
        if not name.startswith("test") or " " in name:
            raise pytest.UsageError(
                f"{path}:{number}: {line.strip()!r} is no name of a test: give one per line, as "
                f"test_case[empty-mine:Mine], and a reason behind '#'"
            )
        if name in known:
            raise pytest.UsageError(f"{path}:{number}: {name} is listed twice")
        known[name] = reason or "a known failure"
    return known
