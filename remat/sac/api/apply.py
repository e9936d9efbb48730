"""From a plan to a model that follows it: modules whose ``forward`` is checkpointed."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.errors import PlanError, ProblemError
from remat.graph.calling import why_no_instance
from remat.sac.api.policy import policy
from remat.sac.policies.compose import PolicyLike
from remat.sac.policies.region import is_traced
from remat.sac.run.module_calls import own_forward, set_forward
from remat.sac.solve.plan import ModulePlan, SACPlan

M = TypeVar("M", bound=nn.Module)

#: In the ``__dict__`` of a model to which a plan that checkpoints nothing has been applied.
_APPLIED_NOTHING = "_remat_applied_nothing"


def apply(
    model: M,
    plan: SACPlan,
    *policies: PolicyLike,
    firm: bool = True,
    strict: bool = True,
    allow_cache_entry_mutation: bool = False,
) -> M:
    """Checkpoint the modules of a plan, in place; a plan of no modules changes nothing.

    The ``forward`` of each of them is replaced on the instance; its class, its name, its parameters
    and the keys of ``state_dict()`` stay. Hooks run outside of what is checkpointed. In eval mode, and
    where no gradients are wanted, modules run as they did.

    Args:
        model: the model that was planned, or one like it.
        plan: which modules, and what of them is stored.
        policies: more policies, which the plan's is composed with; see `remat.sac.policy`.
        firm: whether the plan's verdicts are MUSTs; see `remat.sac.policy`.
        strict: whether other operators than those of the plan are an error; see `remat.sac.policy`.
        allow_cache_entry_mutation: see `remat.sac.context_fn`.

    Returns:
        The model that was given.

    Raises:
        PlanError: a module of the plan is missing in the model, or within another one, or a plan has
            been applied already. The model is left as it was.
        ProblemError: this is no plan, no module, or something is no policy.
        PolicyError: when it runs: a module runs other operators than those of the plan, or the
            policies cannot be followed together.
    """
    _check_module(model)
    if not isinstance(plan, SACPlan):
        raise ProblemError(f"expected a SACPlan, got {type(plan).__name__}")
    chosen = [(m, _find(model, m.name)) for m in plan.modules]
    _check(model, chosen)
    if not chosen:
        model.__dict__[_APPLIED_NOTHING] = True
    options = {
        "firm": firm,
        "strict": strict,
        "allow_cache_entry_mutation": allow_cache_entry_mutation,
    }
    made = [(module, Checkpointed(module, m, policies, options)) for m, module in chosen]
    for module, checkpointed in made:
        set_forward(module, checkpointed)
    return model


def remove(model: M) -> M:
    """Undoes `apply`: every module runs as it did before.

    Raises:
        PlanError: no plan has been applied to the model.
        ProblemError: this is no module.
    """
    _check_module(model)
    found = [(m, own_forward(m)) for m in model.modules()]
    applied = [(m, forward) for m, forward in found if isinstance(forward, Checkpointed)]
    nothing = [m for m in model.modules() if m.__dict__.pop(_APPLIED_NOTHING, False)]
    if not applied and not nothing:
        raise PlanError("no plan has been applied to this model: there is nothing to remove")
    for module, checkpointed in applied:
        set_forward(module, checkpointed.before)
    return model


class Checkpointed:
    """The ``forward`` of a module that runs again in backward, but for what its plan stores.

    An object and not a closure, so that a copy of the model runs the copy's forward, and a pickled
    model can be read again. In eval mode, and where no gradients are wanted, the module runs as it did.

    Attributes:
        before: the ``forward`` that was on the module itself; None where it is the method of the class.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ModulePlan,
        policies: tuple[PolicyLike, ...],
        options: dict[str, bool],
    ) -> None:
        self.before = own_forward(module)
        self._module = module
        self._made_of = (plan, policies, options)
        self._contexts = policy(plan, *policies, **options)
        # Where nothing is stored, a policy would cost its time in Python and change nothing.
        self._is_plain = not plan.stored and not policies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        more: dict[str, Any] = {"context_fn": self._contexts}
        # Compilers read the verdicts of the plan from the policy.
        if self._is_plain and not torch.compiler.is_compiling() and not is_traced():
            more = {}
        return checkpoint(self._forward, *args, use_reentrant=False, **more, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_contexts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        plan, policies, options = self._made_of
        self._contexts = policy(plan, *policies, **options)


def _find(model: nn.Module, name: str) -> nn.Module:
    names: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name in names:
        return names[name]
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near += [n for n in names if n.endswith(f".{name}") or n.rpartition(".")[2] == last]
    known = ", ".join(f"'{n}'" for n in list(dict.fromkeys(near))[:3])
    raise PlanError(
        f"the plan checkpoints module '{name}', which {type(model).__name__} does not have; "
        + (f"near are {known}" if known else "no name is near it")
        + ". Apply the plan to the model that was estimated, before it is wrapped"
    )


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ProblemError(
            why_no_instance(model) or f"expected a torch.nn.Module, got {type(model).__name__}"
        )


def _check(model: nn.Module, chosen: list[tuple[ModulePlan, nn.Module]]) -> None:
    """Refuse modules that would be checkpointed twice."""
    names_forwards = ((n, own_forward(m)) for n, m in model.named_modules())
    applied = next((n for n, f in names_forwards if isinstance(f, Checkpointed)), None)
    if applied is not None:
        raise PlanError(
            f"module '{applied}' follows a plan already: undo that first, by remat.sac.remove(model)"
        )
    names: dict[int, str] = {}
    for plan, module in chosen:
        if id(module) in names:
            raise PlanError(
                f"modules '{names[id(module)]}' and '{plan.name}' of the plan are the same; expected "
                "each once"
            )
        names[id(module)] = plan.name
    for plan, module in chosen:
        for part in module.modules():
            if part is not module and id(part) in names:
                raise PlanError(
                    f"the plan checkpoints module '{names[id(part)]}' within module '{plan.name}'; "
                    "expected modules that are not nested"
                )
