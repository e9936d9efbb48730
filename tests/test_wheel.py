"""The wheel and the source distribution: whole, lean, and usable from another folder."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import remat
from tests.plugins.stranger import environment, output

ROOT = Path(__file__).parents[1]
TRAIN = """
import torch
from torch import nn

import remat
from remat.solvers.kernel import missing

print(remat.__file__)
assert missing() is None, missing()
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
compiled = torch.compile(model, backend="remat", options={"budget": 0.3, "lower": "eager"})
compiled(torch.randn(4, 8)).sum().backward()
(plan,) = remat.plans()
assert all(p.grad is not None for p in model.parameters())
print(plan.saved_bytes)
"""


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert {project["version"], cited[1]} == {remat.__version__}


@pytest.mark.slow
def test_a_wheel_trains_from_another_folder(tmp_path: Path) -> None:
    """Built from the source distribution, which is built from the files of the repository alone."""
    pytest.importorskip("build", reason="build is not installed: pip install build")
    pytest.importorskip("pybind11", reason="pybind11 is not installed: pip install pybind11")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("there is no C++ compiler")
    source, made, place = (tmp_path / name for name in ("source", "dist", "elsewhere"))
    shutil.copytree(
        ROOT / "remat", source / "remat", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (source / "tests").mkdir()
    (source / "tests" / "test_stray.py").touch()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    # A kernel that is not optimised, and cannot be debugged, is compiled sooner.
    setup = (ROOT / "setup.py").read_text()
    assert '"-O3"' in setup
    (source / "setup.py").write_text(setup.replace('"-O3"', '"-O0", "-g0"'))
    place.mkdir()
    output(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, source, cwd=place)

    (archive,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "CITATION.cff", "remat/solvers/_native/module.cpp"} <= names
    assert not [name for name in names if name.startswith("tests") or name.endswith(".so")]
    with zipfile.ZipFile(wheel) as zipped:
        names = set(zipped.namelist())
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / "remat").rglob("*.py")}
    hook = "remat/cli/autoload/remat_run.dist-info/"
    assert modules | {"remat/py.typed", f"{hook}METADATA", f"{hook}entry_points.txt"} <= names
    assert not [name for name in names if name.endswith((".cpp", ".hpp"))]

    python = environment(tmp_path, "--ignore-installed", wheel)
    (place / "train.py").write_text(TRAIN)
    assert (
        output(python.with_name("remat"), "--version", cwd=place).split()[-1] == remat.__version__
    )
    where, saved_bytes = output(python, "-E", "train.py", cwd=place).split()
    assert Path(where).is_relative_to(tmp_path / "venv"), where
    assert int(saved_bytes) >= 0
