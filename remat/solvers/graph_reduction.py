"""Reduce a graph problem to its *core*: the nodes for which there is a decision to make.

Most values of a captured graph are never worth saving: views, values in a chain whose next value is
smaller, values that cost nothing. About a quarter of the nodes remain.
"""

from __future__ import annotations

from remat.solvers.graph_problem import GraphProblem
from remat.solvers.reduction import Reduction


def reduce_graph(problem: GraphProblem) -> Reduction[GraphProblem]:
    """Remove nodes that an optimal decision need not save, and return the reduced problem.

    The reduced problem is called the *core*. Every optimum of the core extends to an optimum of the
    problem. Every node of the core counts as run by forward, and keeps its name. Nodes outside
    forward (``in_forward`` is False) get cost 0 in the core, so a lower bound for the core also
    holds for the whole problem. A decision may run such a node in forward and in backward; only
    `evaluate` on the whole problem counts that cost.

    These rules are applied, the first one once and the others until nothing changes:

    - A savable value of 0 bytes is free, and is always saved. A node computed only from free nodes
      at no cost is free too. Free nodes are left out of the core.
    - A node that cannot be saved and costs nothing is replaced by its inputs.
    - A node whose only reader takes no more bytes is not worth saving, because saving the reader
      avoids more cost. A node that cannot be saved is merged into its only reader.
    - A node that costs nothing and has a single input of no more bytes is not worth saving.
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
    # Saved nodes that backward does not read are harmless: `evaluate` ignores them.
    always = tuple(i for i, s in enumerate(problem.size) if s == 0 and problem.savable[i])
    return Reduction(core=core, kept=tuple(alive), always=always)


class _Work:
    """Graph from which `reduce_graph` removes nodes; indices are those of the original problem."""

    def __init__(self, problem: GraphProblem) -> None:
        n = len(problem)
        self.problem = problem
        self.cost = [c if f else 0 for c, f in zip(problem.cost, problem.in_forward, strict=True)]
        self.savable = list(problem.savable)
        self.needed = [False] * n
        self.inputs: list[list[int]] = [[] for _ in range(n)]
        self.alive: list[int] = []

    def drop_free(self) -> None:
        """Apply the first rule of `reduce_graph`: remove free nodes.

        Free are savable values of 0 bytes, and nodes computed from free nodes alone at no cost.
        Nodes that backward does not need, directly or through others, are removed too.
        """
        p = self.problem
        free = [s and b == 0 for s, b in zip(p.savable, p.size, strict=True)]
        for i, reads in enumerate(p.inputs):
            # Backward never runs a node that is not recomputable, so its inputs do not matter.
            if not free[i] and p.recomputable[i]:
                self.inputs[i] = [j for j in dict.fromkeys(reads) if not free[j]]
                free[i] = not self.inputs[i] and self.cost[i] == 0
        for i in p.needed:
            self.needed[i] = not free[i]
        self.alive = [i for i in range(len(p)) if not free[i]]
        self._drop_unread()

    def simplify(self) -> bool:
        """Apply each rule of `reduce_graph` except the first; return whether the graph changed."""
        changed = self._merge_into_readers()
        changed |= self._skip_worthless()
        changed |= self._inline()
        self._drop_unread()
        return changed

    def order(self) -> list[int]:
        """Return the remaining nodes in the order for the kernel's `GraphCore`.

        A node with ``in_forward`` False comes right after the last of its inputs. So few values are
        alive at any position, which keeps the search of `GraphCore` small.
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
        # In reverse order, a chain merges into its last reader in one pass.
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
        # Nodes that cost nothing to recompute and cannot be saved.
        nothing = {
            i
            for i in self.alive
            if not self.savable[i] and self.cost[i] == 0 and self.problem.recomputable[i]
        }
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
