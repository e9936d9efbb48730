"""Classes of equal modules, and how the choices for a class are spread over its modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat.sac.estimate.modules import ModuleTree
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice

#: A decision: module to its choice.
Decision = dict[int, ModuleChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleClass:
    """Modules with the same operators, memory and choices.

    Attributes:
        members: positions of the modules, in the order in which they run.
        parent: the class of the nearest module above that may be checkpointed; -1 where none is.
        each: members below one member of the parent; all of them without a parent.
        gains: bytes freed by each choice (row) in each call of a member (column).
        choices: what may be chosen, most bytes kept first.
    """

    members: tuple[int, ...]
    parent: int
    each: int
    gains: Ints
    choices: tuple[ModuleChoice, ...]


def classes(
    tree: ModuleTree, options: Mapping[int, tuple[ModuleChoice, ...]], *, apart: bool = False
) -> tuple[ModuleClass, ...]:
    """Groups equal modules: same operators, same memory, same modules below and above.

    Args:
        tree: the modules.
        options: what may be chosen, by candidate; parents come before what is below them.
        apart: make each module a class by itself.
    """
    above = {k: _above(tree, k, options) for k in options}
    inside: dict[int, list[int]] = {k: [] for k in (-1, *options)}
    for k, parent in above.items():
        inside[parent].append(k)
    signs: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    for k in sorted(options, reverse=True):
        key = (_looks(tree, k, options[k]), tuple(signs[c] for c in inside[k]))
        signs[k] = numbers.setdefault(key, len(numbers))
    members: dict[Hashable, list[int]] = {}
    class_of: dict[int, Hashable] = {}
    for k in sorted(options):
        # Calls that come twice free memory at two times: such a module is a class by itself.
        alone = k if apart or len(tree.modules[k].calls) > 1 else -1
        class_of[k] = signs[k], class_of.get(above[k]), alone
        members.setdefault(class_of[k], []).append(k)
    places = {kind: c for c, kind in enumerate(members)}
    found: list[ModuleClass] = []
    for group in members.values():
        first = group[0]
        parent = places.get(class_of.get(above[first]), -1)
        calls = tree.modules[first].calls
        found.append(
            ModuleClass(
                members=tuple(sorted(group, key=lambda k: tree.modules[k].calls[0].begin)),
                parent=parent,
                each=len(group) // (len(found[parent].members) if parent >= 0 else 1),
                gains=np.array(
                    [
                        [call.freeable_bytes - o.kept_bytes for call in calls]
                        for o in options[first]
                    ],
                    dtype=np.int64,
                ),
                choices=options[first],
            )
        )
    return tuple(found)


def _above(tree: ModuleTree, k: int, options: Mapping[int, object]) -> int:
    return next((a for a in tree.ancestors(k) if a in options), -1)


def _looks(tree: ModuleTree, k: int, options: tuple[ModuleChoice, ...]) -> Hashable:
    calls = [(c.activation_bytes, c.input_bytes) for c in tree.modules[k].calls]
    return (tuple(calls), options)


def columns(found: Sequence[ModuleClass]) -> list[slice]:
    """Where the choices of each class stand among those of all classes, one class after the other.

    Vectors over choices, such as how often each is taken, have this order.
    """
    ends = np.cumsum([len(c.choices) for c in found]).tolist()
    return [slice(end - len(c.choices), end) for c, end in zip(found, ends, strict=True)]


def picoseconds(found: Sequence[ModuleClass], *, slack: bool = False) -> Ints:
    """What each choice takes for all calls of a member; or by how much omitted ones may be faster."""
    each = [
        (o.slack_ps if slack else o.recompute_ps) * c.gains.shape[1]
        for c in found
        for o in c.choices
    ]
    return np.array(each, dtype=np.int64)


def below(found: Sequence[ModuleClass]) -> dict[int, list[int]]:
    """The classes right below each class; below -1, those that are below none."""
    inside: dict[int, list[int]] = {c: [] for c in range(-1, len(found))}
    for c, one in enumerate(found):
        inside[one.parent].append(c)
    return inside


def place(found: Sequence[ModuleClass], counts: Ints) -> Decision:
    """Spreads the choices of each class over its members, those that free most first.

    What is freed early is free for longer: of two equal modules, the earlier one frees more.

    Args:
        found: the classes.
        counts: for how many members each choice is taken; see `columns`.
    """
    queues = [
        sorted(
            (
                (int(c.gains[j].sum()), j)
                for j in np.flatnonzero(counts[at]).tolist()
                for _ in range(counts[at][j])
            ),
            reverse=True,
        )
        for c, at in zip(found, columns(found), strict=True)
    ]
    inside = below(found)
    decision: Decision = {}
    for c in inside[-1]:
        bundles = _bundles(found, inside, queues, c, len(found[c].members))
        _assign(found, inside, c, found[c].members, bundles, decision)
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
