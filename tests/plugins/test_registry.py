"""Foreign code is found, checked, refused by name, and never spoils the rest."""

from __future__ import annotations

import importlib.metadata
import types
import warnings

import pytest

import remat
from remat.errors import PluginError, ProblemError, SolverError
from remat.plugins import PluginWarning, Registry, builtin, registry
from remat.solvers import KnapsackProblem, Solver, run

OURS = tuple(kind.name for kind in builtin.remat_solvers())


class Loopback(Solver):
    """Hands everything on to dp."""

    name = "loopback"

    def solve(self, problem, **kwargs):
        return registry().solver("dp").solve(problem, **kwargs)


def plugin(*offers, hook="remat_solvers", name="acme"):
    """A plugin module that offers something through a hook."""
    module = types.ModuleType(name)

    def offer():
        return list(offers)

    offer.__name__ = hook
    setattr(module, hook, remat.hookimpl(offer))
    return module


def entry_points(monkeypatch, **modules) -> None:
    """Make importlib.metadata find entry points that load what is given, or raise it."""

    class Entry:
        def __init__(self, name, value):
            self.name, self.value, self._loaded = name, f"{name}_module", value

        def load(self):
            if isinstance(self._loaded, BaseException):
                raise self._loaded
            return self._loaded

    registry()  # the registry of the process keeps the entry points that are really there
    entries = [Entry(name, value) for name, value in modules.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)


def test_ours_come_through_the_same_hooks_in_table_order() -> None:
    assert tuple(registry().solvers)[: len(OURS)] == OURS
    assert registry() is registry()
    needing_no_compiler = ("greedy", "dp", "milp", "pulp", "cpsat", "auto")
    assert tuple(name for name in OURS if name in needing_no_compiler) == needing_no_compiler
    assert set(needing_no_compiler) <= set(registry().solver_names())


def test_a_foreign_solver_is_found_by_entry_point(monkeypatch) -> None:
    entry_points(monkeypatch, acme=plugin(Loopback))
    found = Registry()
    assert tuple(found.solvers) == (*OURS, "loopback")
    problem = KnapsackProblem((3, 4, 5), (3, 4, 6), 8)
    assert run(found.solver("loopback"), problem).saved == (0, 2)
    assert found.problems == ()


def test_a_plugin_that_raises_while_loading_is_refused_and_the_rest_works(monkeypatch) -> None:
    entry_points(
        monkeypatch, broken=ImportError("no libfoo"), quits=SystemExit(3), z=plugin(Loopback)
    )
    with pytest.warns(PluginWarning) as caught:
        found = Registry()
    assert len(caught) == 2
    first = found.problems[0]
    assert str(first) == (
        "plugin 'broken' (broken_module) is refused: it raised ImportError while loading: no libfoo"
    )
    assert isinstance(first, PluginError)
    assert isinstance(first.__cause__, ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, not again
        assert tuple(found.solvers) == (*OURS, "loopback")


def test_a_hook_that_raises_or_returns_no_list_is_refused(monkeypatch) -> None:
    @remat.hookimpl
    def remat_solvers():
        raise RuntimeError("boom")

    boom = types.SimpleNamespace(remat_solvers=remat_solvers)
    entry_points(monkeypatch, boom=boom, z=plugin(Loopback))
    found = Registry()
    with pytest.warns(PluginWarning, match="'boom' is refused: its remat_solvers raised Runtime"):
        assert "loopback" in found.solvers

    @remat.hookimpl(specname="remat_solvers")
    def offer_none():
        return Loopback

    entry_points(monkeypatch, none=types.SimpleNamespace(offer_none=offer_none))
    with pytest.warns(PluginWarning, match="'none' is refused.*return a list of classes"):
        assert tuple(Registry().solvers) == OURS


def _with(**attributes):
    return type("Odd", (Loopback,), {"name": "odd", **attributes})


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (Loopback(), "is an instance: return the class, Loopback"),
        ("loopback", "'loopback' is not a class"),
        (dict, "dict does not derive from remat.solvers.base.Solver"),
        (_with(name=""), "Odd has no name"),
        (_with(name="two words"), "Odd has the name 'two words'"),
        (_with(name="all"), "Odd has the name 'all'"),
        (_with(name="greedy"), "the name 'greedy' of Odd is taken"),
        (_with(exact="yes"), "Odd.exact must be True or False as class data, got 'yes'"),
        (_with(time_limit=None), "Odd.time_limit must be True or False as class data, got None"),
        (_with(integer_limit=2.0**53), "Odd.integer_limit must be an integer above 0 or None"),
        (_with(integer_limit=True), "Odd.integer_limit must be an integer above 0 or None"),
        (_with(requires="highspy"), "Odd.requires must be a tuple of module names, got 'highspy'"),
        (_with(extra=3), "Odd.extra must be text"),
        (_with(solve=lambda self, problem: []), "Odd.solve must be callable as solve"),
        (_with(solve_graph=lambda self: []), "Odd.solve_graph must be callable as solve_graph"),
        (_with(refuses=lambda self: None), "Odd.refuses must be callable as refuses"),
        (_with(__init__=lambda self, size: None), r"Odd\(\) needs arguments"),
        (type("Idle", (Solver,), {"name": "idle"}), "Idle solves nothing"),
    ],
)
def test_what_is_unusable_is_refused_by_name(monkeypatch, offered, said) -> None:
    entry_points(monkeypatch, acme=plugin(offered), other=plugin(Loopback))
    found = Registry()
    with pytest.warns(PluginWarning, match=f"^plugin 'acme': a class is refused: .*{said}"):
        assert tuple(found.solvers) == (*OURS, "loopback")
    assert len(found.problems) == 1


def test_a_name_between_two_plugins_goes_to_the_first_in_name_order(monkeypatch) -> None:
    second = type("Second", (Loopback,), {})
    entry_points(monkeypatch, b=plugin(second), a=plugin(Loopback))
    with pytest.warns(PluginWarning, match="plugin 'b': .* 'loopback' of Second is taken"):
        assert Registry().solvers["loopback"] is Loopback


def test_a_module_without_hooks_or_with_a_misspelt_one_is_refused(monkeypatch) -> None:
    misspelt = plugin(Loopback, hook="remat_solver")
    wrong = types.SimpleNamespace(remat_solvers=remat.hookimpl(_takes_argument))
    entry_points(monkeypatch, empty=types.ModuleType("empty"), misspelt=misspelt, wrong=wrong)
    with pytest.warns(PluginWarning):
        found = Registry()
    empty, unknown, argument = map(str, found.problems)
    assert "'empty' is refused: it implements no hook" in empty
    assert "'misspelt' is refused: it implements a hook that does not exist" in unknown
    assert "remat_solver" in unknown
    assert "'wrong' is refused: it cannot be registered" in argument
    assert tuple(found.solvers) == OURS


def _takes_argument(config):
    return []


_takes_argument.__name__ = "remat_solvers"


def test_registering_by_hand_and_taking_out_again() -> None:
    with registry().registered(plugin(Loopback), "by-hand") as name:
        assert name == "by-hand"
        assert registry().solver("loopback") == Loopback()
        with pytest.raises(PluginError, match="'by-hand' is refused: it cannot be registered"):
            registry().register(plugin(Loopback), "by-hand")
    assert "loopback" not in registry().solvers
    with pytest.raises(PluginError, match="no plugin 'by-hand' to unregister"):
        registry().unregister("by-hand")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gredy", "unknown solver 'gredy': known are greedy, dp, .*; did you mean 'greedy'?"),
        ("CP-SAT", "did you mean 'cpsat'?"),
        ("xyzzy", "unknown solver 'xyzzy': known are greedy, dp, [a-z_, -]*$"),
        ("no_such_module:Mine", "importing 'no_such_module' raised ModuleNotFoundError"),
        ("math:Mine", "module 'math' has no 'Mine'"),
        ("math:sqrt", "'math:sqrt' is unusable: .* is not a class"),
    ],
)
def test_an_unknown_solver_is_answered_with_the_known(name, said) -> None:
    with pytest.raises(SolverError, match=said.replace("?", r"\?")) as raised:
        registry().solver(name)
    assert raised.value.solver == name


def test_a_refused_solver_asked_for_says_why(monkeypatch) -> None:
    entry_points(monkeypatch, acme=plugin(_with(exact="yes")))
    found = Registry()
    with pytest.warns(PluginWarning):
        assert found.solvers
    with pytest.raises(
        SolverError, match=r"unknown solver 'odd'.*Odd\.exact must be True or False"
    ):
        found.solver("odd")


def test_a_solver_whose_module_is_missing_is_listed_but_not_handed_out(monkeypatch) -> None:
    needy = _with(requires=("no_such_module_here",), extra="acme[fast]")
    entry_points(monkeypatch, acme=plugin(needy))
    found = Registry()
    assert "odd" in found.solvers
    assert "odd" not in found.solver_names()
    with pytest.raises(SolverError, match=r"'odd' is not available here: .*'acme\[fast\]'"):
        found.solver("odd")


def test_a_solver_by_path_or_as_it_is() -> None:
    mine = registry().solver("remat.solvers.knapsack.dp:DynamicProgram")
    assert mine == registry().solver("dp")
    assert registry().solver(mine) is mine


def test_passes_and_cost_models_come_the_same_way(monkeypatch) -> None:
    from remat.graph.costs import CostModel

    class Constant(CostModel):
        name = "constant"
        unit = "op"

        def cost(self, node):
            return 1

    nameless = type("Nameless", (CostModel,), {"name": ""})
    entry_points(monkeypatch, acme=plugin(Constant, nameless, hook="remat_cost_models"))
    found = Registry()
    with pytest.warns(PluginWarning, match="Nameless has no name"):
        assert found.cost_models["constant"] is Constant
    assert str(found.cost_model("roofline:h100")) == "roofline:h100"
    with pytest.raises(ProblemError, match=r"unknown cost model 'rofline'.*mean 'roofline'"):
        found.cost_model("rofline:h100")
    assert "dce" in found.passes
