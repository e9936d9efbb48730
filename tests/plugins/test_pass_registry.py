"""Foreign passes, analyses and operators: found, checked, refused by name, and the rest keeps working."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import remat
from remat.errors import PluginError
from remat.graph.ops import OpTaxonomy, declarations, default_taxonomy, is_known
from remat.passes.core.state import PassResult, State
from remat.plugins import PluginWarning, Registry
from remat.plugins.builtin import remat_analyses, remat_passes
from tests.plugins.test_registry import entry_points, plugin

OUR_PASSES = tuple(p.name for p in remat_passes())
OUR_ANALYSES = tuple(a.name for a in remat_analyses())


@dataclass(frozen=True)
class Mine(remat.Pass):
    """Does nothing."""

    name: ClassVar[str] = "mine"

    times: int = 1

    def run(self, state: State) -> PassResult:
        return PassResult(state=state, modified=False)


@dataclass(frozen=True)
class Always(remat.Analysis[bool]):
    """Holds."""

    name: ClassVar[str] = "always"

    def compute(self, state: State) -> bool:
        return True


class Plain(Mine):
    """Inherits fields and declares none."""

    name: ClassVar[str] = "plain"


@dataclass(unsafe_hash=True)
class Thawed(remat.Analysis[bool]):
    """A dataclass, but not a frozen one."""

    name: ClassVar[str] = "thawed"

    def compute(self, state: State) -> bool:
        return True


@dataclass(frozen=True)
class Half(remat.Pass):
    """Has no run."""

    name: ClassVar[str] = "half"


def named(kind: type, name: Any, **attributes: Any) -> type:
    """A frozen dataclass like another, under a name."""
    return dataclass(frozen=True)(type("Odd", (kind,), {"name": name, **attributes}))


def test_foreign_passes_and_analyses_come_behind_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    both = types.ModuleType("both")
    both.remat_passes = remat.hookimpl(named_hook("remat_passes", [Mine]))  # type: ignore[attr-defined]
    both.remat_analyses = remat.hookimpl(named_hook("remat_analyses", [Always]))  # type: ignore[attr-defined]
    entry_points(monkeypatch, acme=both)
    found = Registry()
    assert tuple(found.passes) == (*OUR_PASSES, "mine")
    assert tuple(found.analyses) == (*OUR_ANALYSES, "always")
    assert found.problems == ()
    manager = remat.PassManager.parse("dce,fixpoint(mine(times=3))", passes=found.passes)
    assert str(manager) == "dce,fixpoint(mine(times=3))"


def named_hook(name: str, offers: Any) -> Callable[[], Any]:
    def offer() -> Any:
        return offers

    offer.__name__ = name
    return offer


@pytest.mark.parametrize(
    ("hook", "offered", "said"),
    [
        ("remat_passes", named(Mine, "cse"), "the name 'cse' of Odd is taken"),
        ("remat_passes", named(Mine, "fixpoint"), "the name 'fixpoint' of Odd is taken"),
        ("remat_analyses", named(Always, "positions"), "the name 'positions' of Odd is taken"),
        ("remat_passes", Plain, "Plain is no frozen dataclass: put @dataclass"),
        ("remat_analyses", Thawed, "Thawed is no frozen dataclass"),
        ("remat_passes", Half, "Half is abstract: implement run"),
        ("remat_passes", Always, "Always does not derive from remat.passes.core.base.Pass"),
        ("remat_analyses", Mine, "Mine does not derive from remat.passes.core.state.Analysis"),
        ("remat_passes", named(Mine, "odd", stage="joint"), "Odd.stage must be one of Stage.ANY"),
        ("remat_passes", named(Mine, "odd", not_after=("cse",)), "Odd.not_after must map names"),
        ("remat_passes", named(Mine, "odd", not_after={"cse": None}), "Odd.not_after must map"),
        ("remat_passes", named(Mine, "odd", optional="no"), "Odd.optional must be True or False"),
    ],
)
def test_what_is_unusable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, hook: str, offered: object, said: str
) -> None:
    good = plugin(Mine if hook == "remat_passes" else Always, hook=hook)
    entry_points(monkeypatch, acme=plugin(offered, hook=hook), other=good)
    found = Registry()
    kind = "passes" if hook == "remat_passes" else "analyses"
    names = (*OUR_PASSES, "mine") if kind == "passes" else (*OUR_ANALYSES, "always")
    with pytest.warns(PluginWarning, match="^plugin 'acme': a class is refused: ") as caught:
        assert tuple(getattr(found, kind)) == names
    assert len(caught) == 1
    assert said in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, not again
        assert tuple(getattr(found, kind)) == names
    assert [type(p) for p in found.problems] == [PluginError]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "None is not an OpTaxonomy"),
        ([OpTaxonomy()], "is not an OpTaxonomy"),
        (OpTaxonomy(recomputable={"cumsum"}), "recomputable holds 'cumsum'"),
        (OpTaxonomy(pure={"mine::op"}), "pure holds 'mine::op'"),
        (OpTaxonomy(views=None), "views is None"),  # type: ignore[arg-type]
        (OpTaxonomy(compute_intensive={7}), "compute_intensive holds 7"),
        (OpTaxonomy(recomputable=torch.ops.aten.cumsum), "recomputable is "),  # type: ignore[arg-type]
    ],
)
def test_operators_that_cannot_be_meant_are_refused(
    monkeypatch: pytest.MonkeyPatch, returned: object, said: str
) -> None:
    taxonomy = default_taxonomy()
    before = [set(s) for s in (taxonomy.recomputable, taxonomy.compute_intensive, taxonomy.views)]

    offer = remat.hookimpl(named_hook("remat_operators", returned))
    entry_points(monkeypatch, acme=types.SimpleNamespace(remat_operators=offer))
    with pytest.warns(PluginWarning, match=r"^plugin 'acme'.* refused") as caught:
        Registry().learn_operators()
    assert said in str(caught[0].message)
    after = [taxonomy.recomputable, taxonomy.compute_intensive, taxonomy.views]
    assert after == before


def knowing(**operators: Any) -> types.SimpleNamespace:
    """A plugin that knows some operators."""
    offer = named_hook("remat_operators", OpTaxonomy(**operators))
    return types.SimpleNamespace(remat_operators=remat.hookimpl(offer))


def test_operators_go_with_the_plugin_unless_another_or_the_planner_knows_them_too() -> None:
    taxonomy, made, known = default_taxonomy(), torch.ops.aten.renorm, torch.ops.aten.add
    found = Registry()
    assert made not in taxonomy.recomputable
    with found.registered(knowing(recomputable={made.default}), "second"):
        with found.registered(knowing(recomputable={made, known}), "first"):
            found.learn_operators()
            assert found.problems == ()
        assert made in taxonomy.recomputable
    assert made not in taxonomy.recomputable
    assert known in taxonomy.recomputable


def test_a_plugin_declares_what_may_run_again() -> None:
    with torch.library._scoped_library("remat_plugin_tests", "DEF") as library:
        library.define("mine(Tensor x) -> Tensor")
        made = torch.ops.remat_plugin_tests.mine
        assert not is_known(made.default)
        found = Registry()
        with found.registered(knowing(pure={made}), "acme"):
            found.learn_operators()
            assert found.problems == ()
            assert is_known(made.default)
            assert "remat_plugin_tests::mine" in declarations()
        assert not is_known(made.default)
        assert "remat_plugin_tests::mine" not in declarations()
