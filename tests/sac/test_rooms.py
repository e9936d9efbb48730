"""The rooms of `remat.sac`: imports point down, and go round in no circle."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import remat
from tests.test_layers import imports

ROOT = Path(remat.__file__).parent
#: Each stands on those before it.
ROOMS = ("run", "policies", "estimate", "solve", "api")
FILES = {
    "remat." + str(p.relative_to(ROOT).with_suffix("")).replace("/", "."): p
    for p in (ROOT / "sac").rglob("*.py")
    if p.name != "__init__.py"
}


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
