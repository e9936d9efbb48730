"""The guides say what happens: their code runs, and prints what they show."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from remat.cli import main
from tests.test_layers import ROOMS, ROOT

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = ["writing-a-pass.md"]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line where that begins."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = path.read_text()
    return [
        Block(m.group(1), m.group(2), text[: m.start(2)].count("\n") + 1)
        for m in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("guide", GUIDES)
def test_code_does_what_is_said(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All code of a guide is one program; a block of text behind it is what it prints."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "guide"}
    printed = ""
    for block in blocks(DOCS / guide):
        where = f"{guide}:{block.line}"
        if block.language == "python":
            assert printed == "", f"{where}: what the block before prints is not shown"
            code = compile("\n" * (block.line - 1) + block.text, guide, "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, space)
            printed = out.getvalue().rstrip() + "\n" if out.getvalue() else ""
        elif block.language == "text":
            assert printed == block.text, where
            printed = ""
        elif block.language == "sh":
            for line in block.text.splitlines():
                run(line, where)
        else:
            assert block.language == "toml", f"{where}: nothing checks '{block.language}'"
            assert tomllib.loads(block.text), where


def run(line: str, where: str) -> None:
    """Runs a command of ours; installing a plugin is tested with that plugin."""
    name, *arguments = shlex.split(line)
    if name == "pip":
        return
    assert name == "remat", f"{where}: nothing checks '{name}'"
    command = [sys.executable, "-c", "from remat.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{where}: {done.stderr}"
    assert done.stdout, where


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


def test_the_example_of_reducing_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that the guide captures has the operator that its example looks for."""
    text = (DOCS / "instruments.md").read_text()
    (capture,) = re.findall(r"^remat (capture .*?) *#.*$", text, re.MULTILINE)
    (reduce,) = re.findall(r"^\$ remat (reduce gpt.joint .*)$", text, re.MULTILINE)
    shown = re.search(rf"{re.escape(reduce)}\n(.* nodes) in ", text)
    (tmp_path / "examples").mkdir()
    shutil.copy(DOCS.parent / "examples" / "models.py", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for command in (capture, reduce):
        done = CliRunner().invoke(main, shlex.split(command))
        assert done.exit_code == 0, done.output
    assert shown is not None
    assert shown.group(1) in done.output


# Inductor's decompositions import old code.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_quick_start_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's first two programs define all that they use; Inductor has tests of its own."""
    monkeypatch.chdir(tmp_path)
    first, second = (b.text for b in blocks(DOCS.parent / "README.md")[2:4])
    eager = first.replace('{"budget": 0.3}', '{"budget": 0.3, "lower": "eager"}')
    assert eager != first
    space: dict[str, object] = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for program in (eager, second):
            exec(compile(program, "README.md", "exec", dont_inherit=True), space)
    assert "budget 0.3, cost model" in out.getvalue()
    assert (tmp_path / "plan.json").exists()


def test_the_drawn_house_is_the_one_that_stands() -> None:
    """Every room is drawn in the order in which imports may point, and every file that is named exists."""
    text = (DOCS / "architecture.md").read_text()
    drawn = re.findall(r"^   (\w+)(?:  (\w+))*", text.partition("```")[2], re.MULTILINE)
    rooms = [room for room in reversed(ROOMS) if (ROOT / room).is_dir()]
    assert [row[0] for row in drawn if row[0] in rooms] == [r for r in rooms if r != "testing"]
    assert all(re.search(rf"\b{room}\b", text) for room in ROOMS)
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|cpp))`", text)
    assert len(named) > 20
    missing = [f for f in named if not any((at / f).exists() for at in (ROOT, ROOT.parent))]
    assert missing == []
