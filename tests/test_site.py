"""The site: it builds without a warning, fetches nothing, and shows what the tree and the results say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import remat

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """A script of `docs`, by the name in the test's parameter."""
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location(request.param, DOCS / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None
    or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs-material or mkdocstrings is not installed: pip install 'remat[docs]'",
)
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    """Links, anchors, docstrings and the navigation are mkdocs' to check."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    fetched = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=\W?(?:https?:)?//|<link\b[^>]*stylesheet[^>]*//"
    )
    for page in pages:
        assert not fetched.search(page.read_text()), page.name
    assert not list(tmp_path.rglob("*.py"))


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: remat\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(remat.__all__) - {"__version__"})


@pytest.mark.parametrize("script", ["benchmark_tables"], indirect=True)
def test_tables_are_what_the_results_say(script: ModuleType) -> None:
    shown = []
    for page in script.PAGES:
        text = page.read_text()
        assert script.filled(text) == text, "run: python docs/benchmark_tables.py"
        shown += [name for _, name, _ in script.PLACE.findall(text)]
    assert sorted(shown) == sorted(script.TABLES), "each table stands on one page"


@pytest.mark.parametrize("script", ["pictures"], indirect=True)
def test_pictures_are_what_the_script_draws(script: ModuleType) -> None:
    for name, draw in script.SKETCHES.items():
        assert (DOCS / name).read_text() == draw().svg(), "run: python docs/pictures.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_surprises_name_tests_and_findings_that_exist() -> None:
    page = (DOCS / "surprises.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    for row in rows:
        *_, source, _, held, _ = row.replace("\\|", "").split("|")
        if "the finding" in held:
            assert "findings/" in source, row
        else:
            assert "tests/" in held, row
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page):
        text = (ROOT / path).read_text()  # `test_conformance.py` imports its tests
        assert not name or f"def {name}" in text, f"{path}::{name}"
    for path in re.findall(r"`(findings/\w+\.sh)`", page):
        assert (ROOT / path).exists(), path
