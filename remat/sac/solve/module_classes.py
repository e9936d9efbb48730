"""Equal modules as one class, and how choices for a class are spread over its modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from remat.sac.estimate.modules import ModuleTree
from remat.sac.solve.choices import Choice, Choices

#: A decision: module to its choice.
Decision = dict[int, Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleClass:
    """Modules that run, keep and could recompute the same.

    Attributes:
        members: positions of the modules, in the order in which they run.
        parent: the class of the nearest module above that may be checkpointed; -1 where none is.
        each: members below one member of the parent; all of them without a parent.
        gains: bytes freed by each choice, for each call of a member.
        choices: what may be chosen, most bytes kept first.
        floors: see `remat.sac.choices.Choices`.
    """

    members: tuple[int, ...]
    parent: int
    each: int
    gains: tuple[tuple[int, ...], ...]
    choices: tuple[Choice, ...]
    floors: tuple[int, ...]


def classes(
    tree: ModuleTree, options: Mapping[int, Choices], *, apart: bool = False
) -> tuple[ModuleClass, ...]:
    """Puts equal modules together: same operators, same memory, same modules below, same above.

    Args:
        tree: the modules.
        options: what may be chosen, by candidate; parents come before what is below them.
        apart: make each module a class by itself.
    """
    above = {k: _above(tree, k, options) for k in options}
    below: dict[int, list[int]] = {k: [] for k in options}
    for k, parent in above.items():
        if parent >= 0:
            below[parent].append(k)
    signs: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    for k in sorted(options, reverse=True):
        key = (_looks(tree, k, options[k].all), tuple(signs[c] for c in below[k]))
        signs[k] = numbers.setdefault(key, len(numbers))
    class_of: dict[int, int] = {}
    known: dict[Hashable, int] = {}
    members: list[list[int]] = []
    parents: list[int] = []
    for k in sorted(options):
        parent = class_of.get(above[k], -1)
        # Calls that come twice free memory at two times: such a module is a class by itself.
        alone = k if apart or len(tree.modules[k].calls) > 1 else -1
        kind = (signs[k], parent, alone)
        if kind not in known:
            known[kind] = len(members)
            members.append([])
            parents.append(parent)
        class_of[k] = known[kind]
        members[class_of[k]].append(k)
    found = []
    for c, group in enumerate(members):
        first, above_it = group[0], parents[c]
        calls = tree.modules[first].calls
        found.append(
            ModuleClass(
                members=tuple(sorted(group, key=lambda k: tree.modules[k].calls[0].begin)),
                parent=above_it,
                each=len(group) // (len(members[above_it]) if above_it >= 0 else 1),
                gains=tuple(
                    tuple(x.activation_bytes - x.input_bytes - o.kept_bytes for x in calls)
                    for o in options[first].all
                ),
                choices=options[first].all,
                floors=options[first].floors,
            )
        )
    return tuple(found)


def _above(tree: ModuleTree, k: int, options: Mapping[int, object]) -> int:
    return next((a for a in tree.ancestors(k) if a in options), -1)


def _looks(tree: ModuleTree, k: int, options: tuple[Choice, ...]) -> Hashable:
    calls = [(c.activation_bytes, c.input_bytes) for c in tree.modules[k].calls]
    return (tuple(calls), options)


def place(found: Sequence[ModuleClass], counts: Sequence[Sequence[int]]) -> Decision:
    """Spreads the choices of each class over its members, those that free most first.

    What is freed early is free for longer: of two equal modules, the earlier one frees more.

    Args:
        found: the classes.
        counts: for each class and choice, for how many members it is taken.
    """
    queues = [
        sorted(
            ((sum(c.gains[j]), j) for j, n in enumerate(taken) for _ in range(n)),
            reverse=True,
        )
        for c, taken in zip(found, counts, strict=True)
    ]
    below = {c: [d for d, x in enumerate(found) if x.parent == c] for c in range(-1, len(found))}
    decision: Decision = {}
    for c in below[-1]:
        bundles = _bundles(found, below, queues, c, len(found[c].members))
        _assign(found, below, c, found[c].members, bundles, decision)
    return decision


#: What one module and those below it get: bytes freed, a choice of its own or -1, and the bundles
#: for each class below it.
_Bundle = tuple[int, int, tuple[tuple["_Bundle", ...], ...]]


def _bundles(
    found: Sequence[ModuleClass],
    below: Mapping[int, Sequence[int]],
    queues: list[list[tuple[int, int]]],
    c: int,
    count: int,
) -> list[_Bundle]:
    own = queues[c][:count]
    made: list[_Bundle] = [(gain, j, ()) for gain, j in own]
    rest = count - len(own)
    parts = [
        (found[d].each, _bundles(found, below, queues, d, rest * found[d].each)) for d in below[c]
    ]
    for i in range(rest):
        mine = tuple(tuple(b[i * each : (i + 1) * each]) for each, b in parts)
        made.append((sum(b[0] for group in mine for b in group), -1, mine))
    return sorted(made, key=lambda b: -b[0])


def _assign(
    found: Sequence[ModuleClass],
    below: Mapping[int, Sequence[int]],
    c: int,
    members: Sequence[int],
    bundles: Sequence[_Bundle],
    decision: Decision,
) -> None:
    for k, (_, j, mine) in zip(members, bundles, strict=True):
        if j >= 0:
            decision[k] = found[c].choices[j]
            continue
        i = found[c].members.index(k)
        for d, group in zip(below[c], mine, strict=True):
            each = found[d].each
            _assign(found, below, d, found[d].members[i * each : (i + 1) * each], group, decision)
