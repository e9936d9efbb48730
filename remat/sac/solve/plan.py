"""Plans for eager code: which modules are checkpointed, and which of their operators are stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from remat.errors import PlanError, ProblemError
from remat.sac.solve import explanation

#: Version of the JSON form.
JSON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """One checkpointed module.

    Attributes:
        name: its fully qualified name, as in ``model.named_modules()``.
        ops: names of its operators in the order in which they run, ``"aten.mm.default"``; those
            that checkpointing ignores are left out.
        stored: indices of the operators whose results are stored; all others run again.
        stored_bytes: bytes of those results.
        discarded_bytes: bytes of the other results.
        recompute_ms: milliseconds that the others take.
    """

    name: str
    ops: tuple[str, ...]
    stored: tuple[int, ...]
    stored_bytes: int
    discarded_bytes: int
    recompute_ms: float

    def __post_init__(self) -> None:
        if list(self.stored) != sorted(set(self.stored)) or any(
            not 0 <= i < len(self.ops) for i in self.stored
        ):
            raise ProblemError(
                f"module '{self.name}': stored must be increasing indices of its {len(self.ops)} "
                f"operators, got {list(self.stored)[:8]}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SACPlan:
    """What an eager training step recomputes, module by module.

    Attributes:
        modules: the checkpointed modules, in the order in which they run.
        budget_bytes: bytes that the step was to fit into.
        peak_bytes: estimated peak of the step under this plan.
        plain_peak_bytes: estimated peak without checkpointing.
        recompute_ms: estimated milliseconds of recomputation.
        step_ms: estimated milliseconds of the step without recomputation.
        bound_ms: no plan that fits recomputes less than this.
        world_size: over how many ranks parameters and gradients are sharded.
        solver: who decided.
        mode: how runtimes were estimated.
    """

    modules: tuple[ModulePlan, ...]
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    recompute_ms: float
    step_ms: float
    bound_ms: float
    world_size: int = 1
    solver: str = ""
    mode: str = ""

    def __getitem__(self, name: str) -> ModulePlan:
        """The plan of one module.

        Raises:
            ProblemError: the module is not checkpointed.
        """
        for module in self.modules:
            if module.name == name:
                return module
        known = ", ".join(m.name for m in self.modules) or "none"
        raise ProblemError(f"module '{name}' is not checkpointed by this plan; it does: {known}")

    def explain(self) -> str:
        """The plan as text: its figures, and what each module keeps, frees and computes again.

        Modules that are alike are one row.
        """
        return explanation.explain(self)

    def code(self) -> str:
        """Python to paste: it makes this plan, and applies it to a variable ``model``."""
        return explanation.code(self)

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps({"remat_sac_plan": JSON_VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SACPlan:
        """Reads a plan that `to_json` wrote.

        Raises:
            PlanError: the text is no plan, cut off, of another version, or has wrong fields.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise PlanError(f"this is not a saved checkpointing plan: {error}") from None
        if not isinstance(data, dict) or "remat_sac_plan" not in data:
            raise PlanError(
                "this is not a saved checkpointing plan: expected JSON with the key 'remat_sac_plan'"
            )
        version = data.pop("remat_sac_plan")
        if version != JSON_VERSION:
            raise PlanError(
                f"this plan is of version {version!r}; this remat reads version {JSON_VERSION}"
            )
        modules = data.pop("modules", None)
        if not isinstance(modules, list):
            raise PlanError("saved checkpointing plan: field 'modules' is missing or no list")
        read = tuple(_read(ModulePlan, m, "module") for m in modules)
        made: SACPlan = _read(cls, {**data, "modules": read}, "plan")
        return made


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "tuple[str, ...]": (list, tuple),
    "tuple[int, ...]": (list, tuple),
    "tuple[ModulePlan, ...]": (tuple,),
}
_ELEMENTS: dict[str, type] = {
    "tuple[str, ...]": str,
    "tuple[int, ...]": int,
    "tuple[ModulePlan, ...]": ModulePlan,
}


def _read(kind: Any, data: Any, what: str) -> Any:
    """A dataclass from the fields of a JSON object, each of the type that it must have."""
    if not isinstance(data, dict):
        raise PlanError(f"saved checkpointing plan: a {what} is a {type(data).__name__}")
    known = {f.name: str(f.type) for f in fields(kind)}
    missing, unknown = sorted(known.keys() - data.keys()), sorted(data.keys() - known.keys())
    if missing or unknown:
        raise PlanError(f"saved checkpointing plan: fields missing: {missing}, unknown: {unknown}")
    values: dict[str, Any] = {}
    for name, wanted in known.items():
        value: Any = data[name]
        element = _ELEMENTS.get(wanted)
        if type(value) not in _KINDS[wanted] or (
            element is not None and any(type(v) is not element for v in value)
        ):
            raise PlanError(
                f"saved checkpointing plan: field '{name}' is not {wanted}: {value!r:.60}"
            )
        values[name] = tuple(value) if element is not None else value
    try:
        return kind(**values)
    except ProblemError as error:
        raise PlanError(f"saved checkpointing plan: {error}") from None
