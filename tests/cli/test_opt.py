"""``remat opt`` and ``remat repro``: graph text in and out, what is told where, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

import remat
from remat.graph.text import parse_graph, parse_joint, read_joint
from remat.plugins.registry import registry
from tests.cli.command import run, shown, told
from tests.passes.instruments import passes as bad
from tests.passes.instruments.sample import REPLAY, TEXT, WHOLE, step

MODELS = '''
def product():
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    return (lambda x, w: (x @ w).sin().sum()), (x, w)
'''  # fmt: skip


class BadPasses:
    """A plugin of passes that misbehave."""

    @staticmethod
    @remat.hookimpl
    def remat_passes() -> list[type[remat.Pass]]:
        return [bad.Returns, bad.Raises, bad.Breaks, bad.Wrong, bad.Liar]


@pytest.fixture(autouse=True)
def steps(folder: Path) -> Iterator[None]:
    (folder / "step.joint").write_text(TEXT)
    (folder / "replay.joint").write_text(REPLAY)
    name = registry().register(BadPasses())
    yield
    registry().unregister(name)


def opt(*args: str, text: str | None = None) -> Result:
    done = run("opt", *args, text=text)
    assert done.exit_code == 0, done.output
    return done


# In and out ---------------------------------------------------------------------------------------


def test_text_in_and_text_out() -> None:
    done = opt("step.joint", "--passes", "dce,cse")
    assert done.stderr == ""
    after = parse_joint(done.stdout)
    expected = remat.PassManager.parse("dce,cse").run(step()).joint
    assert after.fingerprint == expected.fingerprint
    assert opt("-", "--passes", "dce,cse", text=TEXT).stdout == done.stdout
    assert opt("-", "--passes", "dce,cse", text=done.stdout).stdout == done.stdout


def test_the_default_pipeline_comes_to_the_plan() -> None:
    done = opt("replay.joint", "--budget", "0", "--solver", "lagrangian", "--cost", "flops")
    forward, backward = done.stdout.split('\ngraph("backward"')
    plan = remat.plan(step(REPLAY), 0, "lagrangian", "flops")
    halves = parse_graph(forward), parse_graph('graph("backward"' + backward)
    for mine, theirs in zip(halves, (plan.forward, plan.backward), strict=True):
        assert [n.name for n in mine.graph.nodes] == [n.name for n in theirs.graph.nodes]


def test_a_file_instead_of_standard_output() -> None:
    done = opt("step.joint", "--passes", "cse", "-o", "out.joint")
    assert done.stdout == ""
    assert len(read_joint("out.joint").graph.nodes) == len(step().graph.nodes) - 5


def test_a_model_is_captured() -> None:
    done = opt("nets.py:product", "--lower", "eager", "--passes", "dce")
    assert parse_joint(done.stdout).lower == "eager"
    written = shown("capture", "nets.py:product", "--lower", "eager", "-o", "it.joint")
    assert re.search("kind +joint\n(.*\n)*file +it.joint", written)
    again = opt("it.joint", "--passes", "dce").stdout
    assert again.split("\n", 1)[1] == done.stdout.split("\n", 1)[1], "but for the name"
    assert read_joint("it.joint").name == "it"


def test_capture_of_a_joint_graph_for_machines() -> None:
    figures = told("capture", "nets.py:product", "--lower", "eager", "-o", "it.joint")
    joint = read_joint("it.joint")
    assert (figures["name"], figures["kind"], figures["file"]) == ("it", "joint", "it.joint")
    assert figures["fingerprint"] == joint.fingerprint
    assert figures["nodes"] == len(joint.graph.nodes)


# Watching -----------------------------------------------------------------------------------------


def test_everything_but_the_graph_goes_to_standard_error(folder: Path) -> None:
    plain = opt("step.joint", "--passes", WHOLE).stdout
    options = ("--print-pipeline", "--print-before-all", "--print-after-all", "--print-changed")
    more = ("--time-passes", "--statistics", "--verify-each", "structure", "--dump-dir", "dumps")
    done = opt("step.joint", "--passes", WHOLE, *options, *more, "--opt-bisect-limit", "99")
    assert done.stdout == plain
    err = done.stderr
    assert err.splitlines()[0] == str(remat.PassManager.parse(WHOLE))
    assert err.count("# *** graph before pass") == err.count("# *** graph after pass") == 9
    assert "# *** dce: changed ***\n--- before dce\n" in err
    assert "BISECT: running pass (1) dce" in err
    assert "time of passes:\n" in err
    assert "statistics:\n" in err
    assert (folder / "dumps" / "009-raise-getitems.after.txt").read_text() == plain


def test_one_pass_is_printed() -> None:
    done = opt("step.joint", "--passes", "dce,cse,dce", "--print-after", "cse")
    assert done.stderr.count("# ***") == 1
    assert "# *** graph after pass 2, cse ***" in done.stderr
    wrong = run("opt", "step.joint", "--passes", "dce", "--print-after", "cse")
    assert wrong.exit_code == 2
    says = "Invalid value for '--print-after': no pass 'cse' to show the graph at"
    assert says in " ".join(wrong.stderr.split())


def test_checks_stand_before_the_graph_or_behind_it() -> None:
    for args in (
        ["--verify-each", "structure", "step.joint"],
        ["step.joint", "--verify-each=numbers"],
    ):
        opt(*args, "--passes", "dce,cse")
    done = run("opt", "step.joint", "--passes", "wrong", "--verify-each=numbers")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: pass 'wrong' failed: it changed the numbers: output 0")
    assert done.stdout == ""


def test_json_for_machines() -> None:
    options = ("--statistics", "--time-passes", "--opt-bisect-limit", "-1")
    data = told("opt", "step.joint", "--passes", "fixpoint(dce,cse)", *options)
    assert data["pipeline"] == "fixpoint(dce,cse)"
    assert (data["modified"], data["partitioned"]) == (True, False)
    assert data["statistics"]["merged"] == 5
    assert [row["name"] for row in data["timing"]] == ["pipeline", "fixpoint", "dce", "cse"]
    assert data["bisect"][0] == "BISECT: running pass (1) fixpoint > dce"
    assert parse_joint(data["text"]).name == "step"


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budget peak:1GiB", "a peak is searched for over many plans"),
        ("--passes returns", "pass 'returns' failed: run() returned NoneType, expected PassResult"),
        ("--passes dce,breaks", "pass 'breaks' failed: it left a broken joint graph: Argument 'mm' of Node 'sin' was used"),
        ("--passes dce,raises", "pass 'raises' failed: KeyError: 'half-way' (passes completed before it: dce)"),
        ("--passes min-cut,solve-graph(budget=0.3)", "the solve-graph pass was given no solver"),
    ],
)  # fmt: skip
def test_a_pass_that_fails(options: str, message: str) -> None:
    done = run("opt", "step.joint", *options.split())
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "(" * 10_000,
        TEXT.replace("aten.exp.default(sin)", "__import__('os').system('touch ran')"),
        "\0" + TEXT,
    ],
    ids=range(4),
)
def test_hostile_or_broken_text_is_refused_without_being_run(
    text: str, by_file: bool, folder: Path
) -> None:
    (folder / "bad.joint").write_text(text)
    done = run("opt", "bad.joint" if by_file else "-", "--passes", "dce", text=text)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (folder / "ran").exists()


def test_what_is_no_graph_at_all(folder: Path) -> None:
    (folder / "bytes.joint").write_bytes(b"\xff\xfe\x00")
    assert "no text in UTF-8" in run("opt", "bytes.joint").stderr
    assert run("opt", str(folder)).exit_code == 1
    extra = run("opt", "step.joint", "hidden_size=3")
    assert extra.exit_code == 2
    assert "'hidden_size=3' is for hf:TYPE only" in extra.stderr


# Reproducers --------------------------------------------------------------------------------------


def test_a_failure_is_written_down_and_seen_again(folder: Path) -> None:
    done = run("opt", "step.joint", "--passes", "dce,raises", "--repro-dir", "repros")
    assert done.exit_code == 1
    (made,) = (folder / "repros").iterdir()
    assert f"reproducer: repros/{made.name}" in done.stderr
    again = ("repro", f"repros/{made.name}")
    seen = run(*again)
    assert seen.exit_code == 1
    raised = "PassError: pass 'raises' failed: KeyError"
    assert re.search(f"outcome +reproduced\nerror +{raised}.*\nrecorded +{raised}", seen.stdout)
    other = run(*again, "--passes", "dce,breaks")
    assert other.exit_code == 3
    says = f"outcome +fails in another way\nerror +PassError: pass 'breaks' .*\nrecorded +{raised}"
    assert re.search(says, other.stdout)
    assert "no longer fails" in shown(*again, "--passes", "dce")
    machine = json.loads(run(*again, "--json").stdout)
    assert machine["outcome"] == "reproduced"
    assert machine["error"].startswith("PassError: pass 'raises' failed")


def test_what_is_no_reproducer() -> None:
    done = run("repro", ".")
    assert done.exit_code == 1
    assert "failure.json' cannot be read" in done.stderr
