"""The cache of measured costs: shared, versioned, and never in the way."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import pytest

from remat.graph.costs import CostWarning, store
from remat.graph.costs.store import Store, cache_path

HERE = "torch 2; a device"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "profile-v1.json"


def reader(path: Path) -> Store:
    """What another process sees."""
    found = Store(path)
    found.load()
    return found


def test_the_first_value_on_disk_stands(path: Path) -> None:
    first, second = Store(path), Store(path)
    first.merge(HERE, {"a": 1, "b": 2})
    second.merge(HERE, {"b": 3, "c": 4})
    assert second.times == {HERE: {"a": 1, "b": 2, "c": 4}}, "every rank plans by the same figures"
    second.merge("elsewhere", {"a": 9})
    assert reader(path).times == {HERE: {"a": 1, "b": 2, "c": 4}, "elsewhere": {"a": 9}}
    assert json.loads(path.read_text())["version"] == 1


def test_nothing_is_lost_when_many_write(path: Path) -> None:
    gate = threading.Barrier(4)

    def write(who: int) -> None:
        mine = Store(path)
        gate.wait()
        for k in range(8):
            mine.merge(HERE, {f"{who}-{k}": 1 + k, "common": 1 + who})

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reader(path).times[HERE]) == 4 * 8 + 1
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".json", ".lock"]


def test_a_lock_that_somebody_sits_on_is_done_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOCK_S", 0.0)
    path.parent.mkdir()
    with store.locked(path):
        Store(path).merge(HERE, {"a": 1})
    assert reader(path).times == {HERE: {"a": 1}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Expecting value"),
        (b'{"version": 1, "times": {"x": {"a', "Unterminated string"),
        (b"\xff\xfe\x00", "decode"),
        (b"[]", "no JSON object of version 1"),
        (b'{"version": 2, "times": {}}', "no JSON object of version 1"),
        (b'{"version": 1}', "'times' is no object of objects"),
        (b'{"version": 1, "times": {"x": 3}}', "'times' is no object of objects"),
        (b'{"version": 1, "times": {"x": {"a": -1}}}', "'a' takes -1"),
        (b'{"version": 1, "times": {"x": {"a": 1.5}}}', r"'a' takes 1\.5"),
        (b'{"version": 1, "times": {"x": {"a": NaN}}}', "'a' takes nan"),
        (b'{"version": 1, "times": {"x": {"a": true}}}', "'a' takes True"),
        (b'{"version": 1, "times": {"x": {"a": 1%s}}}' % (b"0" * 30), "'a' takes 10{30}, "),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_corrupt_cache_is_put_aside_and_rebuilt(path: Path, content: bytes, says: str) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    mine = Store(path)
    with pytest.warns(CostWarning, match=rf"is corrupt \(.*{says}.*kept as .*\.corrupt'"):
        mine.load()
    mine.merge(HERE, {"a": 1})
    assert path.with_name("profile-v1.json.corrupt").read_bytes() == content
    assert reader(path).times == {HERE: {"a": 1}}


def test_a_cache_that_cannot_be_written_is_said_once_and_done_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(path).merge(HERE, {"a": 1})
    before = path.read_bytes()

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "write_whole", refuse)
    mine = reader(path)
    says = r"cannot be written \(Permission denied\).*REMAT_CACHE"
    with pytest.warns(CostWarning, match=says):
        mine.merge(HERE, {"b": 2})
    mine.merge(HERE, {"c": 3})  # a second warning would be an error here
    assert mine.times == {HERE: {"a": 1, "b": 2, "c": 3}}
    assert path.read_bytes() == before


def test_a_cache_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    mine = Store(tmp_path / "file" / "profile-v1.json")
    with pytest.warns(CostWarning, match=r"cannot be read.*point REMAT_CACHE to another folder"):
        mine.load()
    mine.merge(HERE, {"a": 1})  # that it cannot be written either is not said again
    mine.load()
    mine.merge(HERE, {"b": 2})
    assert mine.times == {HERE: {"a": 1, "b": 2}}
    assert (tmp_path / "file").read_text() == "mine"


def test_without_a_file_times_stay_in_memory() -> None:
    mine = Store(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine.load()
        mine.merge(HERE, {"a": 1})
    assert mine.times == {HERE: {"a": 1}}


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_path() == tmp_path / "profile-v1.json"
    monkeypatch.delenv("REMAT_CACHE")
    assert cache_path() == Path("/xdg/remat/profile-v1.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_path() == Path("/home/somebody/.cache/remat/profile-v1.json")

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert cache_path() is None
