"""Apply a plan to a model by replacing the ``forward`` of the planned modules, or remove the plan."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.errors import PlanError, ProblemError
from remat.sac.api.policy import planned
from remat.sac.policies.compose import PolicyLike
from remat.sac.policies.consistency import draws_into_argument
from remat.sac.policies.region import ContextFn, context_fn, is_traced
from remat.sac.run.module_calls import check_module
from remat.sac.solve.plan import ModulePlan, SACPlan, operators_named

M = TypeVar("M", bound=nn.Module)


def apply(
    model: M,
    plan: SACPlan,
    *policies: PolicyLike,
    firm: bool = True,
    strict: bool = True,
    allow_cache_entry_mutation: bool = False,
) -> M:
    """Checkpoint, in place, the modules of a model that a plan names, and return the model.

    `apply` replaces the ``forward`` of each planned module on the instance. The module's class, name, parameters and
    ``state_dict()`` keys stay the same. The module's hooks run outside of the checkpointed ``forward``. In eval mode,
    or if gradients are disabled, a planned module runs its original ``forward``.

    Args:
        model: the model for which the plan was made, or a model with the same modules.
        plan: the modules to checkpoint, and the operators whose results each module stores.
        policies: further checkpointing policies, or lists of operators to save; see `remat.sac.compose`.
        firm: whether the plan's policy answers MUST instead of PREFER; see `remat.sac.planned`.
        strict: whether a module that runs other operators than the plan lists raises an error; see
            `remat.sac.planned`.
        allow_cache_entry_mutation: whether to accept in-place changes to saved tensors without checks.

    Raises:
        PlanError: the model lacks a module of the plan, two planned modules are nested or identical, or
            an earlier plan still checkpoints a module. The model stays unchanged.
        ProblemError: ``model`` is not a module, ``plan`` is not a `SACPlan`, or a policy is invalid.
        PolicyError: raised when a checkpointed module runs, if its operators differ from the plan
            or the policies contradict each other.
    """
    check_module(model)
    if not isinstance(plan, SACPlan):
        raise ProblemError(f"expected a SACPlan, got {type(plan).__name__}")
    targets = [(m, _find(model, m.name)) for m in plan.modules]
    _check(model, targets)
    # All replacements of ``forward`` are built before the first is set, so that an invalid policy leaves the
    # model unchanged.
    replacements = []
    for m, module in targets:
        contexts = context_fn(
            planned(m, firm=firm, strict=strict),
            *policies,
            module=m.name,
            allow_cache_entry_mutation=allow_cache_entry_mutation,
        )
        # Plain checkpointing recomputes every operator. A policy would then only add Python code for each
        # operator, unless the recomputation must not stop early.
        recomputes_all = any(map(draws_into_argument, operators_named(m.ops)))
        is_plain = not m.stored and not policies and not recomputes_all
        replacements.append((module, Checkpointed(module, contexts, is_plain)))
    for module, checkpointed in replacements:
        module.__dict__["forward"] = checkpointed
    return model


def remove(model: M) -> M:
    """Undo `apply`, so that every module runs its original ``forward`` again; return the model.

    Raises:
        ProblemError: ``model`` is not a module.
    """
    check_module(model)
    for module in model.modules():
        if (checkpointed := _applied(module)) is None:
            continue
        if checkpointed.before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = checkpointed.before
    return model


# The replacement is an object rather than a closure, so that a model can be copied. A closure in a copied
# model would still run the modules of the original.
class Checkpointed:
    """Replacement for a module's ``forward``: runs the original ``forward`` under checkpointing.

    Attributes:
        before: the ``forward`` that was set on the instance before `apply`; None if the module used
            the method of its class.
    """

    def __init__(self, module: nn.Module, contexts: ContextFn, is_plain: bool) -> None:
        self.before = module.__dict__.get("forward")
        self._module, self._contexts, self._is_plain = module, contexts, is_plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        context: dict[str, Any] = {"context_fn": self._contexts}
        # A compiler needs the policy even for plain checkpointing, to read the plan's verdicts from the policy.
        if self._is_plain and not torch.compiler.is_compiling() and not is_traced():
            context = {}
        return checkpoint(self._forward, *args, use_reentrant=False, **context, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _applied(module: nn.Module) -> Checkpointed | None:
    """Return the replacement that `apply` set for a module's ``forward``; None if there is no replacement."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Checkpointed) else None


def _find(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a model by its qualified name; an unknown name raises a PlanError."""
    # Duplicates are kept, because a shared module has several names, and the plan may use any of them.
    names: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name in names:
        return names[name]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    suggestions = ", ".join(f"'{n}'" for n in near)
    raise PlanError(
        f"the plan checkpoints module '{name}', which {type(model).__name__} does not have; "
        + (f"near are {suggestions}" if suggestions else "no name is near it")
        + ". Apply the plan to the model that was estimated, before it is wrapped"
    )


def _check(model: nn.Module, targets: list[tuple[ModulePlan, nn.Module]]) -> None:
    """Raise a PlanError if an earlier plan is applied, or if a planned module occurs twice or inside another one."""
    applied = next((n for n, m in model.named_modules() if _applied(m)), None)
    if applied is not None:
        which = f"module '{applied}'" if applied else f"the {type(model).__name__}"
        raise PlanError(
            f"{which} follows a plan already: undo that first, by remat.sac.remove(model)"
        )
    names: dict[int, str] = {}
    for plan, module in targets:
        if id(module) in names:
            raise PlanError(
                f"modules '{names[id(module)]}' and '{plan.name}' of the plan are the same; expected "
                "each once"
            )
        names[id(module)] = plan.name
    # The outer module's recomputation would run a nested module, whose own recomputation would run it once more.
    for plan, module in targets:
        for part in module.modules():
            if part is not module and id(part) in names:
                raise PlanError(
                    f"the plan checkpoints module '{names[id(part)]}' within module '{plan.name}'; "
                    "expected modules that are not nested"
                )
