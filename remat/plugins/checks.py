"""Check the objects that plugins return from hooks, such as solver classes.

Each check returns the first fault as text, or None if the object is usable.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

from remat.solvers.base import KINDS, Solver, check_requires
from remat.solvers.columns import as_integer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Names that no class may have: `remat.testing` reads ``--solver=all`` as every solver.
_RESERVED = ("all",)


def check_class(offered: object, base: type) -> str | None:
    """Return why ``offered`` is not a usable subclass of ``base``; None if it is a usable subclass.

    A usable class is concrete and has a valid name.
    """
    if not inspect.isclass(offered):
        if isinstance(offered, base):
            return f"{offered!r} is an instance: return the class, {type(offered).__name__}"
        return f"{offered!r} is not a class: return subclasses of {base.__name__}"
    if not issubclass(offered, base):
        return f"{offered.__qualname__} does not derive from {base.__module__}.{base.__name__}"
    if inspect.isabstract(offered):
        missing = ", ".join(sorted(getattr(offered, "__abstractmethods__", ())))
        return f"{offered.__qualname__} is abstract: implement {missing}"
    name = getattr(offered, "name", None)
    if not isinstance(name, str) or not name:
        return f"{offered.__qualname__} has no name: give it a class attribute name = 'my-name'"
    if not _NAME.fullmatch(name) or name in _RESERVED:
        return (
            f"{offered.__qualname__} has the name {name!r}: use letters, digits, '-', '_' and '.', "
            f"and not 'all'"
        )
    return None


def check_options(offered: Any) -> str | None:
    """Return why the fields of a plugin's class cannot serve as its options; None if they can.

    The class ``offered`` of a pass or an analysis must be a frozen dataclass.
    """
    where = offered.__qualname__
    # Every class must have its own decorator: a subclass of a dataclass only inherits ``__dataclass_params__``.
    if "__dataclass_params__" not in vars(offered) or not offered.__dataclass_params__.frozen:
        return f"{where} is no frozen dataclass: put @dataclass(frozen=True) above it"
    return None


def check_pass(offered: Any) -> str | None:
    """Return why ``offered`` is not a usable pass class; None if it is usable."""
    from remat.passes.core.base import Pass, Stage

    fault = check_class(offered, Pass) or check_options(offered)
    if fault is not None:
        return fault
    where = offered.__qualname__
    if not isinstance(offered.stage, Stage):
        stages = ", ".join(f"Stage.{s.name}" for s in Stage)
        return f"{where}.stage must be one of {stages}, got {offered.stage!r}"
    rules = offered.not_after
    texts = (*rules, *rules.values()) if isinstance(rules, Mapping) else (rules,)
    if not all(isinstance(text, str) for text in texts):
        return f"{where}.not_after must map names of passes to reasons, got {rules!r}"
    if not isinstance(offered.optional, bool):
        return f"{where}.optional must be True or False as class data, got {offered.optional!r}"
    return None


def check_analysis(offered: object) -> str | None:
    """Return why ``offered`` is not a usable analysis class; None if it is usable."""
    from remat.passes.core.state import Analysis

    return check_class(offered, Analysis) or check_options(offered)


def check_cost_model(offered: object) -> str | None:
    """Return why ``offered`` is not a usable cost model class; None if it is usable."""
    from remat.graph.costs import CostModel

    return check_class(offered, CostModel)


def check_operators(offered: object) -> str | None:
    """Return why ``offered`` is not a usable `OpTaxonomy`; None if it is usable."""
    from remat.graph.ops import OpTaxonomy

    if not isinstance(offered, OpTaxonomy):
        return f"{offered!r} is not an OpTaxonomy"
    for kind in ("recomputable", "compute_intensive", "views", "pure"):
        operators: Any = getattr(offered, kind)
        if not isinstance(operators, (Set, list, tuple)):
            return f"OpTaxonomy.{kind} is {operators!r}: it must be a set of operators"
        for operator in operators:
            if not callable(operator):
                return (
                    f"OpTaxonomy.{kind} holds {operator!r}: it must hold operators, such as "
                    "torch.ops.aten.mm"
                )
    return None


def check_solver(offered: object) -> str | None:
    """Return why ``offered`` is not a usable solver class; None if it is usable."""
    fault = check_class(offered, Solver)
    if fault is not None:
        return fault
    solver: Any = offered
    return _check_capabilities(solver) or _check_methods(solver)


#: Dict from the name of a hook to the check for each object that a plugin returns from this hook.
CHECKS: Mapping[str, Callable[[object], str | None]] = {
    "remat_solvers": check_solver,
    "remat_passes": check_pass,
    "remat_analyses": check_analysis,
    "remat_operators": check_operators,
    "remat_cost_models": check_cost_model,
}


def _check_capabilities(solver: type[Solver]) -> str | None:
    """Return which class attribute of a solver has a wrong type or value, and why; None if all are valid."""
    where = solver.__qualname__
    for flag in ("exact", "deterministic", "time_limit"):
        given: Any = getattr(solver, flag)
        if not isinstance(given, bool):
            return f"{where}.{flag} must be True or False as class data, got {given!r}"
    limit: Any = solver.integer_limit
    if limit is not None and (as_integer(limit) is None or limit < 1):
        return f"{where}.integer_limit must be an integer above 0 or None, got {limit!r}"
    extra: Any = solver.extra
    if not (extra is None or isinstance(extra, str)):
        return f"{where}.extra must be text for pip install or None, got {extra!r}"
    return check_requires(solver)


def _check_methods(solver: type[Solver]) -> str | None:
    """Return which method of a solver remat could not call, and why; None if remat can call all methods."""
    where = solver.__qualname__
    if not solver.solves:
        return f"{where} solves nothing: implement solve(self, problem, *, time_limit=None)"
    if not _accepts(solver):
        return f"{where}() needs arguments: give every argument of its constructor a default"
    calls: list[tuple[str, dict[str, object]]] = [("refuses", {})]
    calls += [(k.method, {"time_limit": None}) for k in KINDS if k.kind in solver.solves]
    for method, keywords in calls:
        function = getattr(solver, method)
        if not callable(function) or not _accepts(function, None, None, **keywords):
            options = ", *, time_limit=None" if keywords else ""
            return f"{where}.{method} must be callable as {method}(self, problem{options})"
    return None


def _accepts(function: Any, *args: object, **kwargs: object) -> bool:
    """Return whether the signature of ``function`` accepts the given positional and keyword arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature may accept the arguments
        return True
    return True
