"""Identifiers use the field's words: those that a reader of the code could not know are refused."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import remat

WORDS = """
    CompiledHalf Found Kept Known LeftOut Siblings Tried WaysPlanner WaysProblem WaysSearch
    Without around_autograd asking bare does_more half halves halves_of hopeful kept_steps
    looks mere noting noting_warnings of_halves of_told refill refillable refilled refills
    shaped speaks_for_itself told unwarned unwatched waited ways without_collection
    write_whole
    """
COINED = frozenset(WORDS.split())

#: Words that name no thing and no action. They may occur, as in ``torch.full``, but no name may be bound to one.
BARE_WORDS = """
    asked beside found full known made moment moments predicted said sent settled tried
    """
VAGUE = frozenset(BARE_WORDS.split())


def coined(source: str) -> list[tuple[int, str]]:
    """Return line and name of each coined identifier. Python before 3.12 does not split f-strings into names."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        (t.start[0], t.string) for t in tokens if t.type == tokenize.NAME and t.string in COINED
    ]


def bound(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable, argument, attribute, function, class and import that a source defines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield node.lineno, name


def vague(source: str) -> list[tuple[int, str]]:
    """Return line and name of each definition whose name is a vague word, with or without underscores around it."""
    return [(line, name) for line, name in bound(source) if name.strip("_") in VAGUE]


def test_coined_identifiers_are_found() -> None:
    source = 'half = "told"  # halves\nfor told in Found(half):\n    pass\n'
    assert coined(source) == [(1, "half"), (2, "told"), (2, "Found"), (2, "half")]


def test_vague_names_are_found_where_they_are_bound() -> None:
    source = """
import sent, torch as made
class Copy:
    sent: int
    def _settled(self, known, *, beside=None): self._said = known
async def tried(*asked, **moments): return torch.full(found=sent)
for i, full in [(said := 1, 2)]: made[full], known_names = sent, asked
try: [i for moment in x]
except E as found: pass
match x:
    case [predicted, *known] | {1: 2, **tried}: pass
"""
    assert sorted(vague(source)) == [
        (2, "made"),
        (4, "sent"),
        (5, "_said"),
        (5, "_settled"),
        (5, "beside"),
        (5, "known"),
        (6, "asked"),
        (6, "moments"),
        (6, "tried"),
        (7, "full"),
        (7, "said"),
        (8, "moment"),
        (9, "found"),
        (11, "known"),
        (11, "predicted"),
        (11, "tried"),
    ]


def test_identifiers_are_words_of_the_field() -> None:
    files = sorted(Path(remat.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    sources = [(p, p.read_text("utf-8")) for p in files]
    refused = [
        f"{p}:{line}: {name}"
        for p, source in sources
        for line, name in (*coined(source), *vague(source))
    ]
    assert not refused, "rename these with terms of the field:\n" + "\n".join(refused)
