"""Graphs between passes: which files are written, what is printed, and what a diff shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from remat.errors import RematError
from remat.graph.text import parse_graph, parse_joint
from remat.passes.instruments import Printed
from remat.passes.joint.dce import DeadCode
from tests.passes.instruments.passes import Raises, Wrong, run
from tests.passes.instruments.sample import TEXT, WHOLE, step


def test_files_are_numbered_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    run(step(), "dce,fixpoint(cse,dce),min-cut,partition", Printed(to=folder, before=True))
    places = ["dce", *["fixpoint.cse", "fixpoint.dce"] * 2, "min-cut", "partition"]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{number:03}-{place}.{when}.txt"
        for number, place in enumerate(places, 1)
        for when in ("after", "before")
    ]
    assert (folder / "001-dce.before.txt").read_text() == TEXT
    merged = parse_joint((folder / "002-fixpoint.cse.after.txt").read_text())
    assert len(merged.graph.nodes) == len(step().graph.nodes) - 1 - 5
    halves = (folder / "007-partition.after.txt").read_text()
    forward, backward = halves.split('\ngraph("backward"')
    assert [n.op for n in parse_graph(forward).graph.nodes].count("placeholder") == 2
    assert "tangents_1" in backward


@pytest.mark.parametrize("only", [["dce"], "dce"])
def test_only_some_passes_are_dumped_under_the_same_numbers(
    tmp_path: Path, only: str | list[str]
) -> None:
    run(step(), "dce,cse,raise-getitems,dce", Printed(to=tmp_path, only=only))
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "001-dce.after.txt",
        "004-dce.after.txt",
    ]


def test_a_failed_pass_leaves_what_was_before_it(tmp_path: Path) -> None:
    with pytest.raises(RematError):
        run(step(), [DeadCode(), Raises()], Printed(to=tmp_path, before=True))
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "001-dce.after.txt",
        "001-dce.before.txt",
        "002-raises.before.txt",
    ]


def test_a_pass_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RematError, match=r"no pass 'cs' to show the graph at .* it has: cse, dce"):
        run(step(), "dce,cse", Printed(to=tmp_path, only=["cs"]))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RematError, match=r"no dumps can be written to .*file'"):
        run(step(), "dce", Printed(to=tmp_path / "file"))


def test_graphs_are_printed_with_the_pass_above_them() -> None:
    printed: list[str] = []
    run(step(), "dce,fixpoint(cse)", Printed(to=printed.append, before=True, after=False))
    assert [text.splitlines()[0] for text in printed] == [
        "# *** graph before pass 1, dce ***",
        "# *** graph before pass 2, fixpoint > cse ***",
        "# *** graph before pass 3, fixpoint > cse ***",
    ]
    assert printed[0].partition("\n")[2] + "\n" == TEXT


def test_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    run(step(), "dce", Printed(only=["dce"]))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("# *** graph after pass 1, dce ***\njoint(")


def test_what_changed_is_a_diff() -> None:
    printed: list[str] = []
    run(step(), "dce,raise-getitems,dce", Printed(to=printed.append, changed=True))
    assert_expected_inline(
        "\n".join(printed),
        """\
# *** dce: changed ***
--- before dce
+++ after dce
@@ -7,7 +7,6 @@
 mm_1: f32[8, 8] = aten.mm.default(primals_1, primals_2)  # model.py:4 b = x @ w
 sin: f32[8, 8] = aten.sin.default(mm)
 sin_1: f32[8, 8] = aten.sin.default(mm_1)
-unread: f32[8, 8] = aten.exp.default(sin)
 mul: f32[8, 8] = aten.mul.Tensor(sin, sin_1)
 sum_1: f32 = aten.sum.default(mul)
 expand: f32[8, 8](0, 0) = aten.expand.default(tangents_1, [8, 8])
# *** raise-getitems: unchanged ***
# *** dce: unchanged ***""",
    )


def test_the_diff_starts_from_the_pass_before() -> None:
    printed: list[str] = []
    run(step(), [DeadCode(), Wrong()], Printed(to=printed.append, changed=True))
    assert [line for line in printed[1].splitlines()[3:] if not line.startswith(" ")] == [
        "@@ -5,7 +5,7 @@",
        "-sin: f32[8, 8] = aten.sin.default(mm)",
        "+sin: f32[8, 8] = aten.cos.default(mm)",
    ]


def test_changes_of_some_passes_go_to_files(tmp_path: Path) -> None:
    run(
        step(),
        "dce,cse,raise-getitems",
        Printed(to=tmp_path, changed=True, only=["cse", "raise-getitems"]),
    )
    changed, unchanged = sorted(tmp_path.iterdir())
    assert (changed.name, unchanged.name) == (
        "002-cse.changed.txt",
        "003-raise-getitems.unchanged.txt",
    )
    text = changed.read_text()
    assert text.startswith("--- before cse\n+++ after cse\n")
    assert "unread" not in text
    assert unchanged.read_text() == ""


def test_a_split_is_shown_whole() -> None:
    printed: list[str] = []
    run(step(), WHOLE, Printed(to=printed.append, changed=True))
    titles = [text.splitlines()[0].removesuffix(" ***").split(": ")[1] for text in printed]
    same = "unchanged"
    assert titles == ["changed", "changed", same, same, same, "split", same, "changed", same]
    assert 'graph("forward"' in printed[5]
    assert 'graph("backward"' in printed[5]


def test_one_instrument_serves_many_runs() -> None:
    printed: list[str] = []
    changed = Printed(to=printed.append, changed=True)
    run(step(), "dce", changed)
    run(step(), "dce", changed)
    assert printed[0] == printed[1]
