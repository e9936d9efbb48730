"""Read policies by module, which save, recompute or offload a module's values, or give the module a budget.

The pattern of a policy is a glob over the names of `torch.nn.Module.named_modules`, in which ``*``
matches dots too. If several patterns match a module, the last one decides. `region` sets a policy for
code that has no module.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx
from torch.fx import traceback

from remat.errors import BudgetError, ProblemError
from remat.graph.capture.source import enclosing_modules, module_path
from remat.units import Budget, some_of

#: Key under which `region` annotates nodes.
REGION = "_remat_region"
#: Metadata key for the text of the policy that set the checkpoint tag of a node.
TAGGED_BY = "remat_policy"
#: Policy values that are not budgets.
_WORDS = ("save", "recompute", "offload")
#: Largest number of patterns or modules that an error lists.
_SHOWN = 6


class Treatment(enum.Enum):
    """How a plan treats the values of a module: save, recompute, offload, or stay within a budget."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A pattern, and the treatment of the values that modules with matching names compute.

    Attributes:
        pattern: a glob over names of modules; for a `region`, the region's name.
        treatment: whether the values are saved, recomputed, offloaded or under a budget.
        saved_bytes: the most bytes that each matched module may save; 0 unless the treatment is a
            budget.
        in_code: whether the user's code sets the policy with `region`.
    """

    pattern: str
    treatment: Treatment
    saved_bytes: int = 0
    in_code: bool = False

    def __str__(self) -> str:
        if self.in_code:
            named = f", {self.pattern!r}" if self.pattern else ""
            return f"remat.region('{self.treatment.value}'{named})"
        return f"policy '{self.pattern}={self.value}'"

    @property
    def value(self) -> str:
        """The treatment as text that `read_policies` parses: ``"save"``, or ``"saved:1024B"`` for a budget."""
        is_budget = self.treatment is Treatment.BUDGET
        return f"saved:{self.saved_bytes}B" if is_budget else self.treatment.value

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the name of a module."""
        # If a block of the model is compiled by itself, names are relative to the block. The module
        # ``layers.0.mlp`` is then called ``mlp``, and the pattern ``*.mlp`` must match this name too.
        pattern = self.pattern
        return fnmatchcase(name, pattern) or (
            pattern.startswith("*.") and fnmatchcase(name, pattern[2:])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module with its submodules, or a region of code, to which one policy applies.

    Attributes:
        policy: the policy for the values computed in this part.
        name: name of the outermost module that the pattern matches, or ``"region N"`` with the
            number of the region.
    """

    policy: Policy
    name: str


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies by module, in the user's order. A later policy overrides an earlier one."""

    given: tuple[Policy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.given)

    def __str__(self) -> str:
        """The policies as JSON, which `read_policies` parses; empty without policies."""
        return json.dumps({p.pattern: p.value for p in self.given}) if self.given else ""

    def parts(self, nodes: Sequence[fx.Node]) -> list[Part | None]:
        """Return for each node the module or region whose policy applies to the node; None if no policy applies."""
        of_path = functools.cache(self._part_of)
        parts: list[Part | None] = []
        number, before = 0, None
        for node in nodes:
            mark = region_of(node)
            if mark != before and node.op == "call_function":
                # If the code of a region runs several times, each run counts as a region of its own. Two runs
                # without other nodes between them cannot be told apart.
                number, before = number + 1, mark
            # The policy of a `region` in code overrides policies by pattern.
            parts.append(of_path(module_path(node)) if mark is None else _in_code(mark, number))
        return parts

    def _part_of(self, path: str) -> Part | None:
        names = enclosing_modules(path)
        for policy in reversed(self.given):
            for name in names:
                if policy.matches(name):
                    return Part(policy=policy, name=name)
        return None

    def unmatched(self, nodes: Iterable[fx.Node]) -> list[Policy]:
        """Return the policies, overridden or not, whose patterns match no module of a graph."""
        names = module_names(nodes)
        return [p for p in self.given if not any(map(p.matches, names))]


def module_names(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the names of the modules that nodes belong to, in graph order, each module before its submodules."""
    paths = dict.fromkeys(map(module_path, nodes))
    return list(dict.fromkeys(name for path in paths for name in enclosing_modules(path)))


def read_policies(given: object) -> Policies:
    """Parse policies that save, recompute or offload values by module.

    Args:
        given: a dict of values by pattern, this dict as JSON text, or one or several texts
            ``"PATTERN=VALUE"``. A value is ``"save"``, ``"recompute"``, ``"offload"``, or a budget:
            ``{"budget": remat.Saved("1GiB")}`` or the text ``"saved:1GiB"``. None means no
            policies.

    Raises:
        ProblemError: ``given`` has another form, or a pattern or value is invalid.
    """
    if given is None or isinstance(given, Policies):
        return given or Policies()
    items: Any = given
    if isinstance(given, str):
        try:
            items = json.loads(given) if given else {}
        except ValueError:
            items = [given]
    if isinstance(items, Mapping):
        items = list(items.items())
    elif isinstance(items, Iterable):
        items = [tuple(str(text).rpartition("=")[::2]) for text in items]
    else:
        raise ProblemError(f"policies is {given!r}; {_EXPECTED}")
    read: dict[str, Policy] = {}
    for pattern, value in items:
        policy = _read(pattern, value)
        read.pop(policy.pattern, None)  # a repeated pattern moves to its last place
        read[policy.pattern] = policy
    return Policies(tuple(read.values()))


_EXPECTED = (
    "expected a dict by patterns over names of modules: policies={'*.self_attn': 'save', '*.mlp': 'recompute', "
    "'lm_head': {'budget': remat.Saved('1GiB')}}; on the command line --policy '*.mlp=recompute'"
)


def _read(pattern: object, value: object) -> Policy:
    if not isinstance(pattern, str) or not pattern.strip():
        raise ProblemError(
            f"the pattern {pattern!r} of policies is no name of a module; {_EXPECTED}"
        )
    if isinstance(value, str) and value in _WORDS:
        return Policy(pattern=pattern, treatment=Treatment(value))
    stated = value["budget"] if isinstance(value, Mapping) and [*value] == ["budget"] else value
    try:
        budget = Budget.parse(stated)
    except BudgetError:
        budget = None
    if budget is None or budget.nbytes is None:
        raise ProblemError(
            f"policy '{pattern}' is {value!r}; expected 'save', 'recompute', 'offload', or a budget of saved bytes: "
            "{'budget': remat.Saved('1GiB')}, as text 'saved:1GiB'"
        )
    return Policy(pattern=pattern, treatment=Treatment.BUDGET, saved_bytes=budget.nbytes)


def region(policy: str, name: str = "") -> contextlib.AbstractContextManager[None]:
    """Set a policy for code that has no module of its own: ``with remat.region("save"): …``.

    A region's policy applies under ``torch.compile(backend="remat")`` and in `remat.plan`, and
    overrides the patterns of ``policies=``. Other backends and eager PyTorch ignore regions.

    Args:
        policy: ``"save"``, ``"recompute"`` or ``"offload"``.
        name: a name that separates this region from an adjacent one.

    Raises:
        ProblemError: ``policy`` is none of these texts.
    """
    if policy not in _WORDS:
        raise ProblemError(f"region is {policy!r}; expected one of {', '.join(map(repr, _WORDS))}")
    return traceback.annotate({REGION: f"{policy} {name}".strip()})


def is_region(mark: str) -> bool:
    """Return whether a text is an annotation by `region`, such as ``"save"`` or ``"save NAME"``."""
    return mark.partition(" ")[0] in _WORDS


def region_of(node: fx.Node) -> str | None:
    """Return the text with which `region` annotated a node; None for a node outside of all regions."""
    custom = node.meta.get("custom")
    return custom.get(REGION) if isinstance(custom, dict) else None


def _in_code(mark: str, number: int) -> Part:
    treatment, _, name = mark.partition(" ")
    policy = Policy(pattern=name, treatment=Treatment(treatment), in_code=True)
    return Part(policy=policy, name=f"region {number}")


def no_match(policies: Sequence[Policy], names: Sequence[str], graph: str) -> str:
    """Return an error message for policies whose patterns match no module, with the nearest module names."""
    shown = some_of([f"'{p.pattern}'" for p in policies], _SHOWN)
    if not names:
        return (
            f"policies {shown} match nothing: PyTorch recorded no module for the nodes of '{graph}', whose code is a "
            "function without modules, or the forward of a single one; mark its lines by remat.region"
        )
    last = {name: name.rpartition(".")[2] for name in names}
    near = list[str]()
    for policy in policies:
        leaf = policy.pattern.rpartition(".")[2]
        likely = difflib.get_close_matches(leaf, [*dict.fromkeys(last.values())], n=2, cutoff=0.5)
        near += [name for name in names if last[name] in likely]
        near += difflib.get_close_matches(policy.pattern, names, n=2)
    near = list(dict.fromkeys(near)) or list(names)
    return (
        f"policies {shown} match no module of '{graph}'; the nearest are {some_of(near, _SHOWN)}. Names are those of "
        "model.named_modules(), and * matches dots too; in a block that is compiled by itself they begin inside of it"
    )
