"""Identifiers use the field's words: those that a reader of the code could not know are refused."""

from __future__ import annotations

import io
import tokenize
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


def coined(source: str) -> list[tuple[int, str]]:
    """Return line and name of each coined identifier. Python before 3.12 does not split f-strings into names."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        (t.start[0], t.string) for t in tokens if t.type == tokenize.NAME and t.string in COINED
    ]


def test_coined_identifiers_are_found() -> None:
    source = 'half = "told"  # halves\nfor told in Found(half):\n    pass\n'
    assert coined(source) == [(1, "half"), (2, "told"), (2, "Found"), (2, "half")]


def test_identifiers_are_words_of_the_field() -> None:
    files = sorted(Path(remat.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = [f"{p}:{line}: {name}" for p in files for line, name in coined(p.read_text("utf-8"))]
    assert not found, "rename these with terms of the field:\n" + "\n".join(found)
