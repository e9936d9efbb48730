"""The rooms of `remat.sac`: imports point down, and go round in no circle."""

from __future__ import annotations

import importlib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import remat
from tests.test_layers import imports

ROOT = Path(remat.__file__).parent
#: Each stands on those before it.
ROOMS = ("run", "policies", "estimate", "solve", "api")
#: Earlier places of what users import, which hand on what is in a room now; nothing else imports them.
EARLIER = {
    "remat.sac.modules": "remat.sac.estimate.modules",
    "remat.sac.peaks": "remat.sac.solve.peaks",
}
FILES = {
    "remat." + str(p.relative_to(ROOT).with_suffix("")).replace("/", "."): p
    for p in (ROOT / "sac").rglob("*.py")
    if p.name != "__init__.py"
}


FILES = {name: path for name, path in FILES.items() if name not in EARLIER}


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_place_has_what_is_in_the_room_now(name: str) -> None:
    source = (ROOT / "sac" / f"{name.rpartition('.')[2]}.py").read_text()
    assert {i.name for i in imports(source)} == {EARLIER[name]}
    now, earlier = importlib.import_module(EARLIER[name]), importlib.import_module(name)
    names = [n for n in vars(earlier) if not n.startswith("_")]
    assert names
    assert all(getattr(earlier, n) is getattr(now, n) for n in names)


def test_what_the_earlier_places_are_known_for() -> None:
    from remat.sac.modules import collect_modules
    from remat.sac.peaks import simulate

    assert callable(collect_modules)
    assert callable(simulate)


def test_every_file_has_a_room_and_imports_from_rooms_below() -> None:
    found: dict[str, set[str]] = {}
    for name, path in FILES.items():
        room = name.split(".")[2]
        assert room in ROOMS, name
        inside = [i.name for i in imports(path.read_text()) if i.name.startswith("remat.sac")]
        assert set(inside) <= set(FILES), f"{name} imports what is no file of a room"
        assert all(ROOMS.index(i.split(".")[2]) <= ROOMS.index(room) for i in inside), name
        found[name] = set(inside)
    assert len(list(TopologicalSorter(found).static_order())) == len(FILES)
