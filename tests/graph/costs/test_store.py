"""The cache of measured costs: shared, versioned, and never in the way."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from remat.graph.costs import CostWarning, store
from remat.graph.costs.store import Place, Store, cache_path

HERE = "torch 2; a device"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "profile-v2.sqlite"


def here(times: Mapping[str, int]) -> dict[Place, int]:
    return {(HERE, call): ps for call, ps in times.items()}


def reader(path: Path) -> Store:
    """What another process sees."""
    found = Store(path)
    found.merge({})
    return found


def test_the_first_value_on_disk_stands(path: Path) -> None:
    first, second = Store(path), Store(path)
    first.merge(here({"a": 1, "b": 2}))
    second.merge(here({"b": 3, "c": 4}))
    assert second.times == here({"a": 1, "b": 2, "c": 4}), "every rank plans by the same figures"
    second.merge({("elsewhere", "a"): 9})
    assert reader(path).times == {**here({"a": 1, "b": 2, "c": 4}), ("elsewhere", "a"): 9}


def test_nothing_is_lost_when_many_write(path: Path) -> None:
    gate = threading.Barrier(4)

    def write(who: int) -> None:
        mine = Store(path)
        gate.wait()
        for k in range(8):
            mine.merge(here({f"{who}-{k}": 1 + k, "common": 1 + who}))

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reader(path).times) == 4 * 8 + 1
    assert list(path.parent.iterdir()) == [path]


def test_a_lock_that_another_process_holds_is_done_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOCK_S", 0.0)
    Store(path).merge(here({"a": 1}))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    mine = Store(path)
    with pytest.warns(CostWarning, match=r"cannot be used \(database is locked\)"):
        mine.merge(here({"b": 2}))
    assert mine.times == here({"b": 2})
    other.close()
    mine.merge(here({"c": 3}))
    assert mine.times == here({"a": 1, "b": 2, "c": 3})


@pytest.mark.parametrize("content", [b"{}", b"SQLite format 3\x00" + b"x" * 4096])
def test_a_corrupt_cache_is_put_aside_and_rebuilt(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    mine = Store(path)
    with pytest.warns(CostWarning, match=r"is corrupt \(.*kept as .*\.corrupt'"):
        mine.merge({})
    mine.merge(here({"a": 1}))
    assert path.with_name(f"{path.name}.corrupt").read_bytes() == content
    assert reader(path).times == here({"a": 1})


@pytest.mark.parametrize("ps", [0, 1.5, "much"])
def test_what_is_no_time_does_not_reach_the_file(path: Path, ps: object) -> None:
    Store(path).merge(here({"a": 1}))
    with sqlite3.connect(path) as other, pytest.raises(sqlite3.IntegrityError):
        other.execute("INSERT INTO times VALUES ('x', 'a', ?)", (ps,))
    other.close()


def test_a_table_of_another_form_is_done_without(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE times (a, b)")
    other.close()
    mine = Store(path)
    with pytest.warns(CostWarning, match=r"cannot be used.*point REMAT_CACHE to another folder"):
        mine.merge(here({"a": 1}))
    mine.merge(here({"b": 2}))  # a second warning would be an error here
    assert mine.times == here({"a": 1, "b": 2})


def test_without_a_file_times_stay_in_memory() -> None:
    mine = Store(None)
    mine.merge(here({"a": 1}))
    assert mine.times == here({"a": 1})


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_path() == tmp_path / "profile-v2.sqlite"
    monkeypatch.delenv("REMAT_CACHE")
    assert cache_path() == Path("/xdg/remat/profile-v2.sqlite")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_path() == Path("/home/somebody/.cache/remat/profile-v2.sqlite")

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert cache_path() is None
