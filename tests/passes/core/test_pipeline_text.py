"""Pipelines as text: whatever an option holds survives, and what cannot be read is pointed at."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.errors import ProblemError, RematError
from remat.graph.costs import CostModel, Flops, Roofline
from remat.passes.core.base import Pass
from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline_text import DEEPEST, read_pipeline, write_pipeline
from remat.passes.core.state import PassResult, State
from remat.passes.joint.dce import DeadCode
from remat.plugins import registry
from remat.plugins.builtin import remat_passes
from remat.solvers.base import Solver
from remat.units import Budget


@dataclass(frozen=True)
class Options(Pass):
    """A pass with an option of every kind."""

    name: ClassVar[str] = "options"

    flag: bool = False
    count: int = 0
    share: float = 0.0
    text: str = ""
    two_words: str = "plain"

    def run(self, state: State) -> PassResult:
        return PassResult(state=state, modified=False)


PASSES: dict[str, type[Pass]] = {p.name: p for p in (Options, Fixpoint, DeadCode)}


def read(text: str) -> tuple[Pass, ...]:
    return read_pipeline(text, passes=PASSES, readers={})


#: Text with more than its share of what pipelines are written with.
AWKWARD = st.text(st.one_of(st.sampled_from('(),="\\ \t\n.-'), st.characters()), max_size=30)


@given(
    options=st.builds(
        Options,
        flag=st.booleans(),
        count=st.integers(),
        share=st.floats(allow_nan=False),
        text=AWKWARD,
        two_words=AWKWARD,
    ),
    limit=st.integers(1, 99),
)
def test_options_of_every_kind_read_back(options: Options, limit: int) -> None:
    inner = Fixpoint((DeadCode(), options), limit)
    passes = (options, DeadCode(), Options(), Fixpoint((DeadCode(), inner)), DeadCode())
    text = write_pipeline(passes)
    assert read(text) == passes
    assert write_pipeline(read(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "dce,cse,functionalize-rng,reorder-backward",
        "min-cut(ban-not-in-allowlist=false,ban-reductions=false),partition",
        "min-cut,knapsack(solver=greedy,budget=0.25),partition",
        "knapsack(solver=dp,budget=saved:1048576B,cost=roofline:a100,time-limit=2.5)",
        'min-cut,agree-ranks(options="a, b",wait-s=5.0),partition',
        "partition,saved-tensor-hooks(pair=int8,filter=no_static,min-bytes=4096)",
        "dce,fixpoint(cse),min-cut,dce",
    ],
)
def test_pipelines_print_as_they_are_written(text: str) -> None:
    manager = remat.PassManager.parse(text)
    assert str(manager) == text
    assert remat.PassManager.parse(str(manager)) == manager


@pytest.mark.parametrize("kind", remat_passes(), ids=lambda p: p.name)
def test_our_passes_read_back_with_every_switch_turned(kind: type[Pass]) -> None:
    switches = {f.name: not f.default for f in fields(kind) if isinstance(f.default, bool)}
    made = kind((DeadCode(),), 3) if kind is Fixpoint else kind(**switches)  # type: ignore[call-arg]
    manager = remat.PassManager((made,))
    assert remat.PassManager.parse(str(manager)) == manager


@given(
    st.text(st.one_of(st.sampled_from('dce,fixpoint(limit=")\\ '), st.characters()), max_size=60)
)
def test_any_text_is_read_or_refused_at_a_column(text: str) -> None:
    try:
        passes = read(text)
    except ProblemError as error:
        first = str(error).split("\n")[0]
        column = int(first.removeprefix("pipeline, column ").split(":")[0])
        assert 1 <= column <= len(text) + 1
    else:
        assert read(write_pipeline(passes)) == passes


def test_blanks_and_quotes() -> None:
    assert read('options(text="a, b)", two-words = plain )') == (Options(text="a, b)"),)
    assert read('options(text="f(a,b)",count=3)') == (Options(text="f(a,b)", count=3),)
    assert write_pipeline((Options(text="f(a,b)"),)) == 'options(text="f(a,b)")'
    assert write_pipeline((Options(text=" a"),)) == 'options(text=" a")'
    assert write_pipeline((Options(text='say "a"'),)) == 'options(text="say \\"a\\"")'


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "expected the name of a pass"),
        ("dce,,dce", 5, "expected the name of a pass"),
        ("optoins", 1, "no pass is called 'optoins'; did you mean 'options'? Known are options,"),
        ("fixpoint(dce,limit)", 14, "no pass is called 'limit'; known are options,"),
        ("dce fixpoint", 5, "expected ',' or the end, got 'f'"),
        ("fixpoint(dce))", 14, "expected ',' or the end, got ')'"),
        ("options(text=f", 8, "this parenthesis is never closed"),
        ("fixpoint(limit=3,dce", 9, "this parenthesis is never closed"),
        ('options(text="a', 14, "this quotation is never closed"),
        ('options(text="a"b)', 17, "expected ',' or ')', got 'b'"),
        ("options(count=1,count=2)", 17, "option 'count' of 'options' is given twice"),
        ("options(count=1.5)", 9, "option 'count' of 'options': expected a whole number, got '1.5'"),
        ("options(share=big)", 9, "expected a number, got 'big'"),
        ("options(flag=True)", 9, "expected true or false, got 'True'"),
        ("options(=1)", 9, "pass 'options' has no option '=1'; it takes: flag"),
        ("options(flag)", 9, "pass 'options' has no option 'flag'"),
        ("dce(fixpoint)", 5, "pass 'dce' has no option 'fixpoint'; it takes: none"),
        ("dce(()", 5, "expected an option, got '('"),
        ("dce,fixpoint()", 5, "'fixpoint' is empty: name the passes inside its parentheses"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_pointed_at(text: str, column: int, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        read(text)
    first, shown, caret = str(caught.value).split("\n")
    assert message in first
    assert first.startswith(f"pipeline, column {column}: ")
    assert shown == f"  {text}"
    assert caret.index("^") == 2 + column - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knapsack(budget=8 bananas)", "bananas"),
        ("knapsack(solver=gredy)", "greedy"),
        ("knapsack(cost=guess)", "guess"),
        ("knapsack(budget=0.5, time-limit=soon)", "column 22: option 'time-limit' of 'knapsack'"),
    ],
)
def test_options_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(RematError, match=message):
        remat.PassManager.parse(text)


@pytest.mark.parametrize("wrong", [None, b"dce", ["dce"]])
def test_a_pipeline_is_text(wrong: Any) -> None:
    with pytest.raises(ProblemError, match="a pipeline is text, got"):
        read(wrong)


def test_nesting_has_a_limit() -> None:
    def nested(depth: int) -> str:
        return "fixpoint(" * depth + "dce" + ")" * depth

    # Twice the passes for each level of repetition would be 2^50 of them.
    assert str(remat.PassManager.parse(nested(DEEPEST))) == nested(DEEPEST)
    for deeper in (DEEPEST + 1, 100_000):  # the limit of the interpreter is not reached
        with pytest.raises(ProblemError, match=f"nested more than {DEEPEST} deep"):
            read(nested(deeper))


def test_long_pipelines_are_read() -> None:
    text = ",".join(["dce", "fixpoint(dce,limit=3)"] * 5_000)
    assert write_pipeline(read(text)) == text


def test_a_long_text_is_shown_where_it_is_wrong() -> None:
    text = ",".join(["dce"] * 10_000) + ",dcee," + ",".join(["dce"] * 10_000)
    with pytest.raises(ProblemError, match="no pass is called 'dcee'") as caught:
        read(text)
    _, shown, caret = str(caught.value).split("\n")
    assert "dcee" in shown
    assert shown[caret.index("^") :].startswith("dcee")
    assert len(shown) < 200


def test_a_huge_value_is_not_shown_whole() -> None:
    with pytest.raises(ProblemError, match="expected a whole number") as caught:
        read(f"options(count={'x' * 100_000})")
    assert len(str(caught.value)) < 1_000
    with pytest.raises(ProblemError, match="count"):
        read(f"options(count={'9' * 100_000})")


# Types of options ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Typed(Pass):
    """A pass whose fields are named, or have defaults, like those of other types."""

    name: ClassVar[str] = "typed"

    budget: int = 0
    solver: float = 1
    cost: str = "dear"
    condition: bool = False
    limit: int | None = None
    within: Budget = Budget(share=1.0)
    model: CostModel = Roofline()
    either: Solver | None = None
    label: str | None = None

    def run(self, state: State) -> PassResult:
        return PassResult(state=state, modified=False)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (
            "typed(budget=3,solver=0.5,cost=roofline,condition=true)",
            Typed(3, 0.5, "roofline", True),
        ),
        ("typed(limit=3)", Typed(limit=3)),
        ("typed(limit=none,label=none)", Typed()),
        ("typed(within=saved:8GiB)", Typed(within=Budget(nbytes=8 << 30))),
        ("typed(model=flops)", Typed(model=Flops())),
        ("typed(label=a b)", Typed(label="a b")),
        ("typed(either=greedy)", Typed(either=registry().solver("greedy"))),
    ],
)
def test_options_are_read_as_their_declared_types(text: str, made: Typed) -> None:
    assert remat.PassManager.parse(text, passes={"typed": Typed}).passes == (made,)


def test_none_is_written_as_it_is_read() -> None:
    @dataclass(frozen=True)
    class Limited(Typed):
        limit: int | None = 7

    (made,) = remat.PassManager.parse("typed(limit=none)", passes={"typed": Limited}).passes
    assert made == Limited(limit=None)
    assert str(made) == "typed(limit=none)"


def test_a_type_that_only_type_checkers_know_is_that_of_the_default() -> None:
    @dataclass(frozen=True)
    class Unresolved(Options):
        count: NotImported = 3  # type: ignore[name-defined]  # noqa: F821

    (made,) = remat.PassManager.parse("it(count=4)", passes={"it": Unresolved}).passes
    assert made == Unresolved(count=4)


def test_options_of_another_type_stay_text_unless_somebody_reads_them() -> None:
    @dataclass(frozen=True)
    class Other(Options):
        where: Path = Path()

    passes, text = {"other": Other}, "other(where=a/b)"
    (plain,) = remat.PassManager.parse(text, passes=passes).passes
    (as_path,) = remat.PassManager.parse(text, passes=passes, readers={Path: Path}).passes
    assert (plain, as_path) == (Other(where="a/b"), Other(where=Path("a/b")))  # type: ignore[arg-type]
