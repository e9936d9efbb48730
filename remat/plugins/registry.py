"""Keep a registry of plugins, and of the solvers, passes and other objects that plugins return from hooks.

A plugin that fails or returns an unusable object is refused, and the other plugins keep working.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import pluggy

from remat.errors import PluginError, ProblemError, SolverError, did_you_mean, levels_to_user
from remat.plugins import builtin, hooks
from remat.plugins.checks import CHECKS, check_solver
from remat.solvers.base import Solver, unavailable
from remat.solvers.isolation.process import isolated, obstacle

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.passes.core.base import Pass
    from remat.passes.core.state import Analysis

_OURS = hooks.PROJECT
_OPERATORS = "remat_operators"
_ISOLATION = (None, "process", "foreign")


class PluginWarning(RuntimeWarning):
    """Warning that remat refuses a plugin, or an object that a plugin returns; other plugins keep working."""


class Registry:
    """Registry of the solvers, passes, analyses, operators and cost models of remat and its plugins, by kind and name.

    Objects of one kind are collected from the plugins when this kind is first requested, so that
    solvers can be used without importing torch. A plugin that fails is refused, and so is an
    unusable object that a plugin returns. A `PluginWarning` gives the reason for a refusal once,
    and `Registry.problems` stores the reason.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._manager.register(builtin, name=_OURS)
        self._collected: dict[str, Mapping[str, Any]] = {}  # collected classes, by hook and name
        #: Errors about plugins, by hook; under "", those about plugins that cannot be loaded.
        self._problems: dict[str, list[PluginError]] = {"": []}
        self._refused: dict[str, str] = {}
        self._warned: set[str] = set()
        #: Sets of the operator taxonomy, each with the operators that plugins added to it.
        self._learnt: list[tuple[set[Any], set[Any]]] = []
        self._discover()

    @property
    def solvers(self) -> Mapping[str, type[Solver]]:
        """A dict from names to solver classes, including solvers that cannot run on this machine.

        remat's own solver classes come first. The solver classes of plugins follow, sorted by name.
        """
        return self._kind("remat_solvers")

    @property
    def passes(self) -> Mapping[str, type[Pass]]:
        """A dict from names to the pass classes of remat and its plugins."""
        return self._kind("remat_passes")

    @property
    def analyses(self) -> Mapping[str, type[Analysis[Any]]]:
        """A dict from names to the analysis classes of remat and its plugins."""
        return self._kind("remat_analyses")

    def learn_operators(self) -> None:
        """Tell planning which properties of operators the plugins declare.

        The properties say, for instance, whether a plan may recompute an operator. Calling this method again has no
        effect. Unregistering a plugin removes the plugin's operators.
        """
        if _OPERATORS in self._collected:
            return
        from remat.graph.ops import default_taxonomy, packet

        for plugin, offer in self._offers(_OPERATORS):
            fault = CHECKS[_OPERATORS](offer)
            if fault is not None:
                self._refuse(_OPERATORS, f"plugin '{plugin}': its operators are refused: {fault}")
                continue
            for kind in fields(offer):
                operators = getattr(default_taxonomy(), kind.name)
                # The packet ``aten.mm`` stands for its overloads, such as ``aten.mm.default``.
                new = set(map(packet, getattr(offer, kind.name))) - operators
                operators.update(new)
                self._learnt.append((operators, new))
        self._keep(_OPERATORS, {})

    @property
    def cost_models(self) -> Mapping[str, type[CostModel]]:
        """A dict from names to the cost model classes of remat and its plugins."""
        return self._kind("remat_cost_models")

    @property
    def problems(self) -> tuple[PluginError, ...]:
        """Errors that state why plugins, or objects that plugins returned, were refused.

        Errors about objects of one kind, such as passes, are missing until that kind is first
        requested.
        """
        return tuple(chain.from_iterable(self._problems.values()))

    def plugin_modules(self) -> tuple[str, ...]:
        """Return the names of all modules with hook implementations, sorted, including remat's."""
        hooks = (getattr(self._manager.hook, name) for name in CHECKS)
        return tuple(sorted({c.function.__module__ for h in hooks for c in h.get_hookimpls()}))

    def solver_names(self) -> tuple[str, ...]:
        """Return the names of the solvers that can run on this machine now."""
        return tuple(name for name, kind in self.solvers.items() if unavailable(kind) is None)

    def solver(self, name: str | Solver, *, isolation: str | None = None) -> Solver:
        """Return an instance of a solver, which runs in this process or in a separate process.

        Args:
            name: a registered name, ``"module:Class"``, or a solver instance.
            isolation: ``"process"``: the solver runs in a separate process, see
                `remat.solvers.isolation.process`. ``"foreign"``: a solver from outside remat runs in a
                separate process if possible. None: the solver runs in this process.

        Raises:
            SolverError: no solver has the name, or the solver cannot run on this machine or in a
                separate process. The message gives a remedy.
            ProblemError: ``isolation`` has another value.
        """
        if isolation not in _ISOLATION:
            values = ", ".join(map(repr, _ISOLATION))
            raise ProblemError(f"isolation must be one of {values}, got {isolation!r}")
        ready = name if isinstance(name, Solver) else self._ready(name)
        if isolation == "process":
            return isolated(ready)
        # A foreign solver that cannot be isolated, such as a class that was typed in, runs in this process.
        # A plugin's class that derives from one of ours has the plugin's module.
        is_foreign = type(ready).__module__.partition(".")[0] != _OURS
        if isolation == "foreign" and is_foreign and obstacle(ready) is None:
            return isolated(ready)
        return ready

    def _ready(self, name: str) -> Solver:
        """Return a new instance of a solver; raise `SolverError` if the solver cannot run on this machine."""
        kind = self.solver_class(name)
        reason = unavailable(kind)
        if reason is not None:
            raise SolverError(name, f"solver '{name}' is not available here: {reason}")
        try:
            return kind()
        except (Exception, SystemExit) as error:  # a plugin's code may raise anything
            raise SolverError(
                name, f"solver '{name}' raised {type(error).__name__} when created: {error}"
            ) from error

    def solver_class(self, name: str) -> type[Solver]:
        """Return the class of a solver, even if the solver cannot run on this machine.

        Args:
            name: a registered name, or ``"module:Class"``.

        Raises:
            SolverError: there is no such solver.
        """
        if not isinstance(name, str):
            raise SolverError(
                repr(name), f"a solver is asked for by name or 'module:Class', got {name!r}"
            )
        if ":" in name:
            return _load(name)
        kind = self.solvers.get(name)
        if kind is None:
            message = unknown("solver", name, self.solvers)
            if name in self._refused:
                message += f"; a plugin offered one of that name, but {self._refused[name]}"
            raise SolverError(name, message)
        return kind

    def cost_model(self, cost: str | CostModel) -> CostModel:
        """Create a cost model from text: the model's registered name, or the name and an argument.

        Args:
            cost: a registered name, optionally with an argument as in ``"roofline:h100"``; or a
                cost model, which is returned as it is.

        Raises:
            ProblemError: there is no such cost model, or its argument is invalid.
        """
        from remat.graph.costs import CostModel

        if isinstance(cost, CostModel):
            return cost
        if not isinstance(cost, str):
            raise ProblemError(
                f"cost is {cost!r}; expected the name of a cost model ({', '.join(self.cost_models)}) or "
                "an instance of one"
            )
        name, colon, argument = cost.partition(":")
        kind = self.cost_models.get(name)
        if kind is None:
            raise ProblemError(unknown("cost model", name, self.cost_models))
        return kind.parse(argument if colon else None)

    def register(self, plugin: object, name: str | None = None) -> str:
        """Register a plugin and return the name under which it is registered.

        Args:
            plugin: a module or object with hook implementations.
            name: name of the plugin in messages; None: the name of the module or class.

        Raises:
            PluginError: the plugin implements no hook or implements a hook wrongly, or is already
                registered.
        """
        name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        try:
            self._manager.register(plugin, name=name)
        except (ValueError, pluggy.PluginValidationError) as error:
            _raise(name, f"cannot be registered: {error}", error)
        try:
            # `register` ignores hook names without a specification; only this check refuses them.
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(plugin)
            _raise(name, f"implements a hook that does not exist: {error}", error)
        # A plugin without any hook has most likely lost its decorators, and would be ignored silently.
        if not self._manager.get_hookcallers(plugin):
            self._manager.unregister(plugin)
            _raise(
                name,
                "implements no hook: it needs a function remat_solvers, remat_passes, "
                "remat_analyses, remat_operators or remat_cost_models marked with @remat.hookimpl",
            )
        self._forget()
        return name

    def unregister(self, name: str) -> None:
        """Remove a plugin and everything that it registered.

        Raises:
            PluginError: no plugin has this name, or the name is remat's own.
        """
        if name == _OURS or not self._manager.has_plugin(name):
            raise PluginError(f"no plugin '{name}' to unregister")
        self._manager.unregister(name=name)
        self._forget()

    @contextlib.contextmanager
    def registered(self, plugin: object, name: str | None = None) -> Iterator[str]:
        """Register a plugin during a ``with`` block, and unregister it afterwards.

        Args:
            plugin: a module or object with hook implementations.
            name: name of the plugin in messages; None: the name of the module or class.

        Yields:
            The name under which the plugin is registered.
        """
        name = self.register(plugin, name)
        try:
            yield name
        finally:
            self.unregister(name)

    def _discover(self) -> None:
        """Register the plugins that installed packages declare as entry points, sorted; warn about refused plugins."""
        entries = importlib.metadata.entry_points(group=hooks.PROJECT)
        # Sorted, because the first of two plugins with equal names wins, and the order of installation
        # is arbitrary.
        for entry in sorted(entries, key=lambda e: (e.name, e.value)):
            try:
                self.register(entry.load(), entry.name)
            except PluginError as error:
                self._problems[""].append(error)
            # A plugin's import may raise anything; a SystemExit would end this process.
            except (Exception, SystemExit) as error:
                self._refuse(
                    "",
                    f"plugin '{entry.name}' ({entry.value}) is refused: it raised "
                    f"{type(error).__name__} while loading: {error}",
                    error,
                )
        self._warn()

    def _kind(self, hook: str) -> Mapping[str, Any]:
        """Return the usable classes that plugins return from a hook, as a dict from name to class."""
        if hook not in self._collected:
            ours: dict[str, Any] = {}
            others: dict[str, Any] = {}
            for plugin, offer in self._offers(hook):
                fault = CHECKS[hook](offer)
                # Of two classes with the same name, the second one is refused.
                if fault is None and (offer.name in ours or offer.name in others):
                    fault = f"the name '{offer.name}' of {offer.__qualname__} is taken"
                if fault is None:
                    (ours if plugin == _OURS else others)[offer.name] = offer
                    continue
                name = getattr(offer, "name", None)
                if isinstance(name, str):
                    self._refused.setdefault(name, fault)
                self._refuse(hook, f"plugin '{plugin}': a class is refused: {fault}")
            self._keep(hook, {**ours, **dict(sorted(others.items()))})
        return self._collected[hook]

    def _keep(self, hook: str, classes: Mapping[str, Any]) -> None:
        """Store the classes that a hook returned; warn about new errors."""
        self._collected[hook] = MappingProxyType(classes)
        self._warn()

    def _refuse(self, hook: str, message: str, cause: BaseException | None = None) -> None:
        """Store an error about a plugin or an object that a plugin returned."""
        problem = PluginError(message)
        problem.__cause__ = cause
        self._problems.setdefault(hook, []).append(problem)

    def _offers(self, hook: str) -> Iterator[tuple[str, Any]]:
        """Yield each object that a plugin returns from a hook, with the plugin's name; remat's own objects first."""
        # Call the implementations one by one, because pluggy's own call ends at the first exception.
        calls = getattr(self._manager.hook, hook).get_hookimpls()
        for call in sorted(calls, key=lambda c: (c.plugin_name != _OURS, c.plugin_name)):
            try:
                offers = call.function()
                if hook == _OPERATORS:
                    offers = [offers]
                if not isinstance(offers, (list, tuple)):
                    raise TypeError(f"it returned {offers!r}: return a list of classes")
            except (Exception, SystemExit) as error:  # a plugin's code may raise anything
                if call.plugin_name == _OURS:  # a bug of remat, which must not go unnoticed
                    raise
                self._refuse(
                    hook,
                    f"plugin '{call.plugin_name}' is refused: its {hook} raised "
                    f"{type(error).__name__}: {error}",
                    error,
                )
                continue
            yield from ((call.plugin_name, offer) for offer in offers)

    def _forget(self) -> None:
        """Clear the stored classes of all plugins, so that the next request calls the plugins' hooks again."""
        learnt = _OPERATORS in self._collected
        for operators, new in self._learnt:
            operators.difference_update(new)
        self._learnt.clear()
        self._collected.clear()
        self._problems = {"": self._problems[""]}
        self._refused.clear()
        if learnt:
            self.learn_operators()

    def _warn(self) -> None:
        """Issue a `PluginWarning` for each error in `problems` that has caused no warning yet."""
        fresh = [str(p) for p in self.problems if str(p) not in self._warned]
        self._warned.update(fresh)
        for message in fresh:
            warnings.warn(message, PluginWarning, stacklevel=levels_to_user())


@functools.cache
def registry() -> Registry:
    """Return the plugin registry of this process, which is created on first use."""
    return Registry()


def unknown(noun: str, name: str, registered: Iterable[str]) -> str:
    """Return the error message for an unknown name, which lists all registered names and the most similar one."""
    names = list(registered)
    meant = did_you_mean(name.lower(), names)
    return f"unknown {noun} '{name}': known are {', '.join(names)}{meant}"


def _load(path: str) -> type[Solver]:
    """Import the solver class at ``"module:Class"``; raise `SolverError` if the class is missing or unusable."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # foreign code runs on import
        raise SolverError(
            path,
            f"solver '{path}': importing '{module_name}' raised {type(error).__name__}: {error}",
        ) from error
    offered = getattr(module, class_name, None)
    if offered is None:
        raise SolverError(path, f"solver '{path}': module '{module_name}' has no '{class_name}'")
    fault = check_solver(offered)
    if fault is not None:
        raise SolverError(path, f"solver '{path}' is unusable: {fault}")
    kind: type[Solver] = offered
    return kind


def _raise(name: str, fault: str, cause: Exception | None = None) -> NoReturn:
    """Raise the `PluginError` that refuses the plugin ``name`` because of ``fault``."""
    raise PluginError(f"plugin '{name}' is refused: it {fault}") from cause
