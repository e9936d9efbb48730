"""Texts that are cut off or mean harm: refused with the place, and nothing in them is run."""

from __future__ import annotations

import builtins
import importlib
import random
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from remat.errors import ProblemError
from remat.graph.text import parse_graph, parse_joint, print_joint
from remat.graph.text.syntax import MAX_BYTES
from tests.graph.text.steps import captured
from tests.graph.text.test_text_first import EVERYTHING

HEAD = 'graph("g", version=1, device="cpu")\n'
JOINT = 'joint("j", version=1, device="cpu", lower="eager", num_fwd_outputs=1)\n'


def refusal(text: str) -> str:
    with pytest.raises(ProblemError) as caught:
        parse_graph(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x = os.system('touch bad')", "no operator 'os::system' is registered in this process"),
        ("x = builtins.eval('1')", "no operator 'builtins::eval' is registered in this process"),
        ("x = operator.attrgetter('a')", "; expected an operator as namespace.name.overload"),
        ("x = torch.load('bad')", "or a function of operator, math or torch.sym_*"),
        ("x = theirlib.op.default()", "import the package that registers it first"),
        ("x = aten.__class__.mro()", "no operator 'aten::__class__' is registered"),
        ("x = aten.mm.__class__()", "it has default, dtype, dtype_out, out; expected an operator"),
        ("x = higher_order.__class__()", "no operator 'higher_order::__class__' is registered"),
        (
            "x = op('aten.mm.default; bad')()",
            "the name 'aten.mm.default; bad'; expected an operator",
        ),
        ("x = op('mm')()", "the name 'mm'; expected an operator"),
        ("x = __import__('os')", "__import__(…); expected placeholder, get_attr, or an operator"),
        ("x = (lambda: 1)()", "'lambda: 1'; expected a dotted name, such as aten.mm.default"),
        ("x = aten.mm.default((lambda: 1)())", "'(lambda: 1)()'; expected a literal"),
        ("x = aten.mm.default(b'x')", "'b'x''; expected a literal, the name"),
        ("x = aten.mm.default(*[])", "'*[]'; expected a literal"),
        ("x = aten.mm.default(**[])", "what follows **; expected a dictionary with names"),
        ("x = aten.mm.default(**{'a=print()': 1})", "expected a dictionary with names as keys"),
        ("x = aten.mm.default({1: 1, []: 1})", "line 3, column 28: a key of a dictionary"),
        ("x = aten.mm.default(slice('a'))", "expected a literal, the name of a node above"),
        ("x = aten.mm.default(torch.device('bad'))", "the device 'bad'; expected one"),
        ("x = aten.mm.default(y)", "the name 'y'; expected a node of a line above"),
        ("x = get_attr('__class__')", "the attribute '__class__'; expected one that constant(…)"),
        ("ok = placeholder()", "the name 'ok'; expected one that is neither taken nor reserved"),
        ("nan = placeholder()", "the name 'nan'; expected one that is neither taken nor reserved"),
        ("ｘ١ = placeholder()", "the name 'x١'; expected letters, digits and _"),
        ("x = placeholder(target='a b')", "the target 'a b'; expected a name"),
        ("x = placeholder(Evil(0))", "'Evil(0)'; expected a descriptor of AOTAutograd"),
        ("x = placeholder(PlainAOTInput('a'))", "expected PlainAOTInput(idx: int)"),
        ("x = placeholder(PlainAOTInput(0, 1))", "expected PlainAOTInput(idx: int)"),
        (
            "x = placeholder(GradAOTOutput(PlainAOTOutput(0)))",
            "GradAOTOutput(grad_of: Differentiable",
        ),
        ("x, y = placeholder()", "'x, y = placeholder()'; expected name: type = call(…)"),
        ("x: f32", "'x: f32'; expected name: type = call(…)"),
        ("x = 3", "'3'; expected a call, or an element as x[0]"),
        ("x = placeholder(), forget", "the mark 'forget'; expected one of must_save"),
        ("x = placeholder(), region(x)", "'x'; expected an integer"),
        ("import os", "'import os'; expected name: type = call(…), part("),
        ("exec('bad')", "'exec('bad')'; expected name: type = call(…), part("),
        ("part('is_forward', x=1)", 'call(…), part("is_forward")'),
        ("part(['is_forward'])", "expected one of is_forward, is_backward"),
        ("part('nowhere')", "expected one of is_forward, is_backward"),
        ("with open('bad', 'w'):\n    return 1", 'or with subgraph("name"):'),
        ("with subgraph('g') as g:\n    return 1", 'or with subgraph("name"):'),
        ("with subgraph('forward'):\n    return 1", "the attribute 'forward'; expected a name"),
        ("with subgraph('__class__.a'):\n    return 1", "the attribute '__class__.a'"),
        ("with subgraph('g'):\n    x = placeholder()", "the end of a graph; expected return …"),
        ("constant('c', f32[2], [1])", "these numbers; expected nested lists in the shape (2,)"),
        ("constant('c', i8[1], [300])", "these numbers; expected nested lists in the shape (1,)"),
        ("attribute('a', opaque('os; bad'))", "the class 'os; bad'; expected the dotted name"),
        ("x = aten.mm.default(" + "9" * 9999 + ")", "what is no Python syntax"),
        ("x: f32[s0] = placeholder()", "the symbol 's0'; expected one that symbols(…) declares"),
        ("x: f32[-1] = placeholder()", "the size -1; expected a number of 0 or more"),
        (f"x: f32[{2**62}] = placeholder()", "expected a tensor that PyTorch makes"),
        (f"x: f32[{2**40}, {2**40}](0, 0) = placeholder()", "a tensor that PyTorch makes: numel"),
        ("x: f32[2](1, 2) = placeholder()", "2 strides; expected 1, one for each dimension"),
        ("x: f32[4](storage=8) = placeholder()", "needs 16 bytes of memory; expected no more than"),
        ("x: f32[2] = placeholder()\ny: f64[2] @ x = placeholder()", "needs 16 bytes of memory"),
        ("x: f32[2] @ y = placeholder()", "the memory of 'y'; expected that of a tensor above"),
        ("x: f32(color=1) = placeholder()", "'color'; expected offset, storage or device"),
        ("x: f32[2](device='cuda:99999') = placeholder()", "the device 'cuda:99999'"),
        ("x: os.system('bad') = placeholder()", "'os.system('bad')'; expected a literal"),
        (
            "x: f32[2](layout=torch.float32) = placeholder()",
            "'layout'; expected offset, storage or",
        ),
        ("x: SymInt[True] = placeholder()", "expected the type of what it computes"),
    ],
)
def test_a_line_is_refused_with_its_place(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(HEAD + "ok = placeholder()\n" + line + "\nreturn ok")
    assert says in said
    at = re.match(r"graph text, line (\d+), column (\d+): ", said)
    assert at is not None
    assert int(at[1]) in (3, 4, 5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1, column 1: the first statement; expected joint("),
        ("x = 1", 'line 1, column 1: the first statement; expected joint("name", version=1, …)'),
        ("joint()", "0 unnamed values; expected one: the name of the graph"),
        (
            'joint("j")',
            "a head with nothing; expected one with version, device, lower, num_fwd_outputs, and if needed static_inputs",
        ),
        (JOINT.replace("version=1", "version=2"), "a text of version 2; expected version 1"),
        (JOINT.replace("=1)", "=-1)"), "num_fwd_outputs as '-1'; expected one such as 0"),
        (JOINT.replace('"eager"', "1"), "lower as '1'; expected one such as 'inductor'"),
        (JOINT[:-2] + ", received=[1])", "received as '[1]'; expected one such as [(0, 0, 0)]"),
        (
            JOINT.replace("=1)", "=1, turns=[(0, 1)])"),
            "turns as '[(0, 1)]'; expected one such as [(0, [(0, 0, 0)], [(0, 0, 0)], [0], [0])]",
        ),
        (JOINT.replace("=1)", "=1, **{})"), "a head with None, device, lower"),
        (JOINT + "symbols(1)", "'1'; expected name=symbol(…)"),
        (JOINT + "symbols(x0=symbol(1))", "a symbol called 'x0'; expected a name such as s77"),
        (JOINT + "symbols(s0=eval('1'))", "'eval('1')'; expected symbol(hint, min=…, max=…)"),
        (JOINT + "symbols(s0=symbol(1, min=2))", "expected min to be below the hint"),
        (
            JOINT + "symbols(s0=symbol(big=2))",
            "'big'; expected hint, min, max, positive or size_like",
        ),
        (JOINT, "the end of a graph; expected return …; is the text cut off?"),
        (JOINT + "x = tangent()\nreturn [x]", "'x' as tangent(…); expected primal(…)"),
        (JOINT + "tangents_1 = primal()\nreturn 1", "'tangents_1' as primal(…); expected tangent"),
        (JOINT + "x = primal()\nreturn [backward(x), forward(x)]", "1 outputs of forward among 2"),
        (JOINT + "x = primal()\nreturn [forward(x), x]", "'x'; expected forward or backward(node,"),
        (JOINT + "x = placeholder()\nreturn x", "placeholder(…); expected primal, tangent"),
        ("\x00", "null bytes"),
        ("\ud800", "text that cannot be read"),
        ("x" * (MAX_BYTES + 1), "is too large; expected at most"),
    ],
    ids=lambda x: repr(x[:30]),
)
def test_a_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(ProblemError) as caught:
        parse_joint(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "x = f.g(" + "-" * 99999 + "1)",
        "x = aten" + ".mm" * 99999 + "()",
        f"x: f32[{'+'.join(['1'] * 99999)}] = p()",
    ],
    ids=["signs", "names", "sums"],
)
def test_what_is_nested_too_deeply_is_refused(line: str) -> None:
    assert refusal(HEAD + line + "\nreturn 1") == "graph text is nested too deeply to be read"


def test_what_is_no_text() -> None:
    with pytest.raises(ProblemError, match="graph text is a bytes; expected a str"):
        parse_joint(b"")  # type: ignore[arg-type]


def test_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a text evaluates nothing, imports nothing by name, and calls no operator of its."""
    text = EVERYTHING
    parse_joint(text)  # whatever is imported late is now
    called: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> NoReturn:
        called.append(args)
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "eval", note)
        patch.setattr(builtins, "exec", note)
        patch.setattr(importlib, "import_module", note)
        patch.setattr(torch._ops.OpOverload, "__call__", note)
        patch.setattr(torch._ops.HigherOrderOperator, "__call__", note)
        read = parse_joint(text)
    assert called == []
    assert print_joint(read) == text


def test_a_text_that_is_cut_off_is_refused() -> None:
    text = print_joint(captured("branches"))
    end = text.rstrip()
    for cut in range(0, len(end), 37):
        with pytest.raises(ProblemError, match=r"graph text, line \d+, column \d+: "):
            parse_joint(text[:cut])
    assert parse_joint(end).fingerprint == parse_joint(text).fingerprint


WORDS = re.compile(r"\w+|\s+|[^\w\s]")
BITS = re.split(
    r"\s+",
    """( ) [ ] , = 0 -1 1e999 None inf 'x' @ ** // s0 lambda f32 torch . ... {} * (1,) - True
    1j b'x' SymInt[s0] nan const(1) storage=4 offset=9 torch.strided u0>=2 Max
    _ operator getitem 99999999999999999999999999 opaque('a.b') device='cuda:3'""",
)


def garbled(text: str, draw: random.Random) -> str:
    """A text with one to three of its words taken out, replaced, or put elsewhere."""
    words = WORDS.findall(text)
    for _ in range(draw.randint(1, 3)):
        at, other = draw.randrange(len(words)), draw.randrange(len(words))
        how = draw.randrange(5)
        if how == 0:
            words[at] = draw.choice(BITS)
        elif how == 1:
            del words[at]
        elif how == 2:
            words[at] = words[other]
        elif how == 3:
            words.insert(at, draw.choice(BITS))
        else:
            words[at : at + draw.randrange(30)] = words[other : other + draw.randrange(30)]
    return "".join(words)


@pytest.mark.slow
def test_a_garbled_text_is_read_or_refused() -> None:
    draw = random.Random(0)
    texts = [EVERYTHING, *(print_joint(captured(n)) for n in ("views", "symbols", "branches"))]
    read = refused = 0
    for _ in range(60):
        try:
            joint = parse_joint(garbled(draw.choice(texts), draw))
        except ProblemError:
            refused += 1
            continue
        read += 1
        text = print_joint(joint)
        assert print_joint(parse_joint(text)) == text
    assert read
    assert refused
