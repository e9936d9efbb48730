"""Records: what is written is read again, and nothing else is taken for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from remat.errors import PlanError, ProblemError
from remat.files import Form, read_record, write_atomic, write_record, writing


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ProblemError("a part has a name")


@dataclass(frozen=True, kw_only=True)
class Whole:
    form: ClassVar[Form] = Form("thing", "a_thing", 2)

    parts: tuple[Part, ...]
    weight: float
    exact: bool
    pairs: tuple[tuple[str, int], ...] = ()
    options: Mapping[str, str]
    _private: object = None


WHOLE = Whole(
    parts=(Part(name="a", sizes=(1, 2)), Part(name="b")),
    weight=0.5,
    exact=True,
    pairs=(("x", 1),),
    options={"k": "v"},
)


def changed(**other: Any) -> str:
    data = json.loads(write_record(WHOLE))
    return json.dumps({k: v for k, v in {**data, **other}.items() if v is not ...})


def test_what_is_written_is_read_again() -> None:
    assert read_record(Whole, write_record(WHOLE)) == WHOLE
    assert json.loads(write_record(WHOLE))["a_thing"] == 2
    assert "_private" not in write_record(WHOLE)


def test_a_field_with_a_default_may_be_missing_and_a_whole_number_is_a_number() -> None:
    read = read_record(Whole, changed(pairs=..., weight=3))
    assert (read.pairs, read.weight, type(read.weight)) == ((), 3.0, float)


def test_fields_that_are_not_in_the_file_are_given() -> None:
    assert read_record(Whole, changed(options=...), options={}).options == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not a saved thing: Expecting"),
        ("[" * 100_000, "this is not a saved thing"),
        (None, "this is not a saved thing: the JSON object must be str"),
        ("[]", "expected JSON with the key 'a_thing'"),
        (changed(a_thing=3), "this thing is of version 3; this remat reads version 2"),
        (changed(exact=...), r"saved thing: fields missing: \['exact'\], unknown: \[\]"),
        (changed(more=1), r"unknown: \['more'\]"),
        (changed(_private=1), r"unknown: \['_private'\]"),
        (changed(exact=1), "field 'exact' is 1, expected bool"),
        (changed(weight=True), "field 'weight' is True, expected float"),
        (changed(weight=10**400), "field 'weight' is 1000000"),
        (changed(parts=[{"name": 1}]), "field 'name' is 1, expected str"),
        (changed(parts=[{"name": "a", "sizes": [1.5]}]), "field 'sizes' is 1.5, expected int"),
        (changed(parts=[{"name": ""}]), "saved thing: a part has a name"),
        (changed(parts=[7]), r"fields missing: \['name'\]"),
        (changed(parts={}), "field 'parts' is {}, expected tuple"),
        (changed(pairs=[["x"]]), "field 'pairs' is .*expected tuple"),
        (changed(options={"k": 1}), "field 'options' is 1, expected str"),
    ],
)
def test_what_is_no_record_is_refused(text: Any, message: str) -> None:
    for error in (ProblemError, PlanError):
        with pytest.raises(error, match=message):
            read_record(Whole, text, error=error)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "nowhere" / "page.json", "{}")
    other = tmp_path / "page.json"
    other.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(other, "{}")
    told = r"^page '.*page\.json' cannot be written: Is a directory; why$"
    with (
        pytest.raises(PlanError, match=told),
        writing(other, "; why", kind="page", error=PlanError),
    ):
        write_atomic(other, "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["page.json"]


def test_a_stream_is_written_to_where_it_stands(tmp_path: Path) -> None:
    code = "from pathlib import Path; from remat.files import write_atomic; write_atomic(Path('/dev/stdout'), 'told')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "told"
    log = tmp_path / "log.txt"
    log.write_text("earlier\n")
    with log.open("a") as file:
        code = f"print('printed'); {code}; print(' and more')"
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert log.read_text() == "earlier\nprinted\ntold and more\n"


def test_links_in_a_circle_and_long_names(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_atomic(loop, "x")
    long = tmp_path / ("n" * 250)
    write_atomic(long, "x")
    assert long.read_text() == "x"
