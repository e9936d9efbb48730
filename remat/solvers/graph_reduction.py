"""Reduce a graph problem to its core, and extend an answer on the core to the whole problem.

Most values of a captured graph are never worth saving: views, values in a chain whose next value is
smaller, values that cost nothing. Without them about a quarter of the nodes is left.
"""

from __future__ import annotations

from remat.solvers.graph_problem import GraphProblem
from remat.solvers.reduction import Reduction


def reduce_graph(problem: GraphProblem) -> Reduction[GraphProblem]:
    """Remove nodes that an optimal decision need not save; every optimum of the core extends to an optimum.

    Every node of the core is in forward and keeps its name. Nodes outside forward count as free to run, so
    a bound for the core is a bound for the whole problem; where a decision makes such a node run in both
    halves, `evaluate` on the whole problem says what that costs.

    - What takes no bytes is saved; what is computed from that alone at no cost is free too.
    - A node that cannot be saved and costs nothing is replaced by its inputs.
    - A node whose only reader takes no more bytes is not worth saving: saving the reader spares more.
      A node that cannot be saved becomes part of its only reader.
    - A node that costs nothing and has one input, of no more bytes, is not worth saving.
    """
    work = _Work(problem)
    work.drop_free()
    while work.simplify():
        pass
    alive = work.order()
    at = {i: k for k, i in enumerate(alive)}
    core = GraphProblem(
        names=tuple(problem.names[i] for i in alive),
        inputs=tuple(tuple(sorted(at[j] for j in work.inputs[i])) for i in alive),
        cost=tuple(work.cost[i] for i in alive),
        size=tuple(problem.size[i] for i in alive),
        savable=tuple(work.savable[i] for i in alive),
        recomputable=tuple(problem.recomputable[i] for i in alive),
        in_forward=(True,) * len(alive),
        needed=tuple(at[i] for i in alive if work.needed[i]),
        unit=problem.unit,
        capacity=problem.capacity,
    )
    always = tuple(i for i, s in enumerate(problem.size) if s == 0 and problem.savable[i])
    return Reduction(core=core, kept=tuple(alive), always=always)


class _Work:
    """The graph while it shrinks; indices are those of the original problem."""

    def __init__(self, problem: GraphProblem) -> None:
        n = len(problem)
        self.problem = problem
        self.cost = [c if f else 0 for c, f in zip(problem.cost, problem.in_forward, strict=True)]
        self.savable = list(problem.savable)
        self.needed = [False] * n
        self.inputs: list[list[int]] = [[] for _ in range(n)]
        self.alive: list[int] = []

    def drop_free(self) -> None:
        """Keeps the nodes that backward may read and that are not free."""
        p = self.problem
        free = [s and b == 0 for s, b in zip(p.savable, p.size, strict=True)]
        for i, reads in enumerate(p.inputs):
            if not free[i] and p.recomputable[i]:
                self.inputs[i] = [j for j in dict.fromkeys(reads) if not free[j]]
                free[i] = not self.inputs[i] and self.cost[i] == 0
        for i in p.needed:
            self.needed[i] = not free[i]
        self.alive = [i for i in range(len(p)) if not free[i]]
        self._drop_unread()

    def simplify(self) -> bool:
        """Applies each of the other rules once; returns whether anything changed."""
        changed = self._merge_into_readers()
        changed |= self._skip_worthless()
        changed |= self._inline()
        self._drop_unread()
        return changed

    def order(self) -> list[int]:
        """What is left, each node outside forward right behind the last of its inputs.

        That keeps few values alive at any place, which `GraphCore` needs.
        """
        anchor: dict[int, int] = {}
        for i in self.alive:
            reads = (anchor[j] for j in self.inputs[i])
            anchor[i] = i if self.problem.in_forward[i] else max(reads, default=0)
        return sorted(self.alive, key=lambda i: (anchor[i], i))

    def _drop_unread(self) -> None:
        read = set[int]()
        for i in reversed(self.alive):
            if self.needed[i] or i in read:
                read.add(i)
                read.update(self.inputs[i])
        self.alive = [i for i in self.alive if i in read]

    def _merge_into_readers(self) -> bool:
        p, changed = self.problem, False
        readers: dict[int, set[int]] = {i: set() for i in self.alive}
        for i in self.alive:
            for j in self.inputs[i]:
                readers[j].add(i)
        gone = set[int]()
        for i in reversed(self.alive):
            if self.needed[i] or len(readers[i]) != 1 or not p.recomputable[i]:
                continue
            (reader,) = readers[i]
            if self.savable[i] and self.savable[reader] and p.size[reader] <= p.size[i]:
                self.savable[i] = False
            if not self.savable[i]:
                self.cost[reader] += self.cost[i]
                kept = (j for j in self.inputs[reader] if j != i)
                self.inputs[reader] = list(dict.fromkeys((*kept, *self.inputs[i])))
                for j in self.inputs[i]:
                    readers[j].discard(i)
                    readers[j].add(reader)
                gone.add(i)
                changed = True
        self.alive = [i for i in self.alive if i not in gone]
        return changed

    def _skip_worthless(self) -> bool:
        p, changed = self.problem, False
        for i in self.alive:
            if self.savable[i] and p.recomputable[i] and self.cost[i] == 0:
                reads = self.inputs[i]
                if len(reads) == 1 and self.savable[reads[0]] and p.size[reads[0]] <= p.size[i]:
                    self.savable[i] = False
                    changed = True
        return changed

    def _inline(self) -> bool:
        changed = False
        nothing = set(filter(self._is_nothing, self.alive))
        for i in self.alive if nothing else ():
            if not nothing.isdisjoint(self.inputs[i]):
                through: list[int] = []
                for j in self.inputs[i]:
                    through += self.inputs[j] if j in nothing else (j,)
                self.inputs[i] = list(dict.fromkeys(through))
                changed = True
        for i in reversed(self.alive) if nothing else ():
            if self.needed[i] and i in nothing:
                self.needed[i] = False
                for j in self.inputs[i]:
                    self.needed[j] = True
                changed = True
        return changed

    def _is_nothing(self, i: int) -> bool:
        """Follows from its inputs at no cost, and cannot be saved itself."""
        return not self.savable[i] and self.cost[i] == 0 and self.problem.recomputable[i]
