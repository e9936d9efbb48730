"""README and pages say what happens: their code and commands run, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import remat
from remat.cli import main
from tests.test_layers import ROOMS, ROOT

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [ROOT.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: of the code in it; empty where it is a drawing or a message.
        text: what is between the fences.
        line: where that begins.
        reason: why it cannot run here, by the comment above it; None where it runs.
    """

    language: str
    text: str
    line: int
    reason: str | None = None


#: A comment that says why the next block does not run, code that is not shown, or a block.
PIECE = re.compile(
    r"^<!-- not run: (?P<reason>.*?) -->$"
    r"|^<!-- (?P<hidden>python|sh)\n(?P<code>.*?)^-->$"
    r"|^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order, code that is not shown among them."""
    text = page.read_text()
    found: list[Block] = []
    reason = None
    for m in PIECE.finditer(text):
        if m["reason"] is not None:
            reason = m["reason"]
            continue
        kind = "code" if m["hidden"] else "text"
        line = text[: m.start(kind)].count("\n") + 1
        language = m["hidden"] or m["language"]
        found.append(Block(language=language, text=m[kind], line=line, reason=reason))
        reason = None
    return found


#: What pages that show parts of a program take for granted.
PROGRAM = """
import torch
from torch import nn

import remat

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
x = torch.randn(8, 16)
joint = remat.capture(model, (x,), lower="eager")
"""
#: Those that define everything they use.
WHOLE = ("README.md", "tutorial.md", "usage.md", "writing-a-pass.md", "writing-a-solver.md")

TRAIN = """
import torch
from torch import nn

def build():
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(8)]
    return nn.Sequential(*layers), (torch.randn(512, 64),), {}
"""

STEPS = """import torch


def twice(x, w):
    a = torch.sin(x @ w)
    b = torch.sin(x @ w)
    return (a * b).sum()


def build():
    return twice, tuple(torch.randn(512, 512, requires_grad=True) for _ in range(2)), {}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which a page is read: a clone's examples and the reader's scripts."""
    shutil.copytree(ROOT.parent / "examples", tmp_path / "examples")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch, "compile", without_inductor(torch.compile))
    for name in ("backend", "capture", "fit"):
        monkeypatch.setattr(remat, name, partial(getattr(remat, name), lower="eager"))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def without_inductor(compile_model: Callable[..., Any]) -> Callable[..., Any]:
    """Steps run the planned graphs as they are: Inductor has tests of its own."""

    def compiled(model: Any, *, options: Any = None, **how: Any) -> Any:
        if how.get("backend") == "remat":
            options = {"lower": "eager", **options}
        return compile_model(model, options=options, **how)

    return compiled


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Inductor's decompositions import old code
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_does_what_it_says(page: Path, place: Path) -> None:
    """Its code is one program, its commands are run, and both print what is shown."""
    space: dict[str, Any] = {"__name__": "page"}
    if page.name not in WHOLE:
        exec(PROGRAM, space)
    found = blocks(page)
    figures = any(b.language in ("console", "text") and b.reason is None for b in found)
    if not figures:
        # No figure is shown, so one layer does as well as several, and the operators of eager PyTorch.
        found = [replace(b, text=TWO_LAYERS.sub(r"\g<1>1", b.text)) for b in found]
        examples = place / "examples" / "models.py"
        one = examples.read_text().replace("layers: int = 4", "layers: int = 1")
        examples.write_text(one.replace("range(4)", "range(1)"))
    printed, shrunk = "", any(name in page.read_text() for name in SMALL)
    for block in found:
        where = f"{page.name}:{block.line}"
        if block.reason is not None:
            continue
        if block.language == "python":
            code = compile(
                "\n" * (block.line - 1) + block.text, page.name, "exec", dont_inherit=True
            )
            if named := re.match(r"# (\w+\.py)\n", block.text):
                Path(named[1]).write_text(block.text)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, space)
            printed = out.getvalue()
        elif block.language == "text":
            assert printed.rstrip() == block.text.rstrip(), where
        elif block.language == "sh":
            for line in commands(block.text):
                run(line, where, as_written=figures)
        elif block.language == "console":
            for session in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                (line, *shown) = session.replace("\\\n", "").splitlines()
                compare = not shrunk and "--time-passes" not in line  # those are measured
                assert_shown(shown, run(line, where), where, compare=compare)
        elif block.language == "toml":
            assert tomllib.loads(block.text), where
        else:
            assert not block.language, f"{where}: nothing runs '{block.language}'"
            assert not COMMAND.search(block.text), f"{where}: name the language of these commands"


#: Where code and commands ask for two layers.
TWO_LAYERS = re.compile(r"""(layers?"?(?:=|: ))2\b""")
COMMAND = re.compile(
    r"^(\$ )?(remat|make|pip|python|pytest|git) |^(import|from|with|>>>) ", re.MULTILINE
)


def commands(text: str) -> list[str]:
    """The commands of a shell block; one in quotes may go over several lines."""
    found: list[str] = []
    for line in text.splitlines():
        if found and found[-1].count('"') % 2:
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


#: The sizes of models of `transformers`: theirs take minutes.
SMALL = {
    "hf:llama": "num_hidden_layers=1 hidden_size=64 intermediate_size=128 vocab_size=99",
    "hf:gpt2": "n_layer=1 n_embd=48 vocab_size=99",
    "hf:t5": "num_layers=1 num_decoder_layers=1 d_model=64 d_ff=96 vocab_size=99",
}


#: Commands that plan for Inductor's operators, which are more; the default has tests in `tests/cli`.
LOWERED = ("plan", "explain", "compare", "frontier", "sweep", "policies", "fit")


def run(line: str, where: str, *, as_written: bool = True) -> str:
    """What a command prints; it must succeed, or end as the comment behind it says.

    Where no figure depends on it, commands plan for the operators of eager PyTorch.
    """
    name, *arguments = shlex.split(line, comments=True)
    ends = int(m[1]) if (m := re.search(r"# exit code (\d+)", line)) else 0
    if name == "remat":
        for small in (SMALL[a].split() for a in arguments if a in SMALL):
            arguments = [a for a in arguments if not a.startswith("num_hidden_layers=")] + small
        if not as_written and arguments[0] in LOWERED and "--lower" not in arguments:
            arguments += ["--lower", "eager"]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == ends, f"{where}: {line}\n{done.output}"
        return done.output
    if name == "make":
        command = ["make", "--dry-run", "-C", str(ROOT.parent), *arguments]
    else:
        assert name == "python", f"{where}: nothing runs '{name}'"
        command = [sys.executable, *arguments]
        if "pytest" in arguments:  # the whole suite runs from an empty folder in `tests/plugins`
            command += ["-k", "test_case"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == ends, f"{where}: {line}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


#: How far a number may be from the one that a page shows: plans and prices change a little with versions.
NEAR = 0.1
NUMBER = re.compile(r"[-+]?\d[\d.,]*%?")


def assert_shown(shown: list[str], printed: str, where: str, *, compare: bool) -> None:
    """Every line that a page shows is printed, in that order, with numbers near those shown.

    On a page whose models are smaller here, numbers are not compared.
    """
    left = iter(printed.splitlines())
    for line in shown:
        if line.strip() != "…":
            found = any(alike(line, other) and (not compare or near(line, other)) for other in left)
            assert found, f"{where}: not printed: {line}\n{printed}"


def alike(line: str, other: str) -> bool:
    one, two = (NUMBER.sub("#", re.sub(r"-{3,}", "---", text)).split() for text in (line, other))
    return one == two


def near(line: str, other: str) -> bool:
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=True)
    return all(abs(a - b) <= NEAR * abs(a) for a, b in (map(as_number, pair) for pair in pairs))


def as_number(text: str) -> float:
    return float(text.strip("%").rstrip(".,").replace(",", ""))


#: How many blocks of each page do not run.
LEFT_OUT = {"README.md": 2, "budgets.md": 1, "command-line.md": 2, "distributed.md": 1, "fit.md": 2}
LEFT_OUT |= {"limits.md": 1, "selective-checkpointing.md": 1, "trainers.md": 4, "tutorial.md": 3}


def test_what_does_not_run_says_why() -> None:
    left_out = Counter(p.name for p in PAGES for b in blocks(p) if b.reason is not None)
    assert left_out == LEFT_OUT


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


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
