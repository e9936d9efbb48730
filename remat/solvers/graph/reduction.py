"""Reduce a graph problem to its *core*: the nodes for which there is a decision to make.

Most values of a captured graph are never worth saving: views, values that cost nothing, and values
whose only reader is smaller. About a quarter of a captured graph's nodes remain in the core.
"""

from __future__ import annotations

from remat.solvers.graph.problem import GraphProblem
from remat.solvers.knapsack.reduction import Reduction


def reduce_graph(problem: GraphProblem) -> Reduction[GraphProblem]:
    """Remove nodes that an optimal decision need not save, and return the reduced problem, the *core*.

    In the core, forward runs every node: ``in_forward`` is True. A node that forward need not run costs 0 in the core,
    so a lower bound for the core also holds for the whole problem. Only `evaluate` on the whole problem counts a second
    run of a node that forward need not run. If forward runs all nodes of the problem, every optimum of the core extends
    to an optimum of the problem.

    The first of the following rules is applied once. The other rules are applied until nothing changes.

    First rule: a savable value of 0 bytes is *free*, which means that it is always saved. A recomputable node is free
    too if it costs nothing and reads free nodes only. Free nodes are left out of the core.

    Second rule: a recomputable node that costs nothing and cannot be saved is replaced by its inputs.

    Third rule: a recomputable node with a single reader is not saved if the reader can be saved and takes no more
    bytes. Saving the single reader of a node avoids more cost than saving the node. Each recomputable node that may not
    be saved is merged into its single reader. The third rule does not apply to nodes that backward reads directly.

    Fourth rule: a recomputable node that costs nothing is not saved if its single input can be saved and takes no more
    bytes.
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
    return Reduction(core=core, remaining=tuple(alive), always=always)


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
        """Apply the first rule of `reduce_graph`: remove free nodes, and nodes that backward does not need."""
        p = self.problem
        free = [s and b == 0 for s, b in zip(p.savable, p.size, strict=True)]
        for i, reads in enumerate(p.inputs):
            # Backward never runs a node that is not recomputable, so such a node needs no inputs here.
            if not free[i] and p.recomputable[i]:
                self.inputs[i] = [j for j in dict.fromkeys(reads) if not free[j]]
                free[i] = not self.inputs[i] and self.cost[i] == 0
        for i in p.needed:
            self.needed[i] = not free[i]
        self.alive = [i for i in range(len(p)) if not free[i]]
        self._drop_unread()

    def simplify(self) -> bool:
        """Apply all rules of `reduce_graph` except the first, once each; return whether the graph changed."""
        changed = self._merge_into_readers()
        changed |= self._skip_worthless()
        changed |= self._inline()
        self._drop_unread()
        return changed

    def order(self) -> list[int]:
        """Return the remaining nodes in an order with few values alive at a time, as the native search needs."""
        # A node with `in_forward` False comes right after the last of its inputs, so that few values are alive at any
        # position. All other nodes keep their order.
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
        # In reverse order, one pass merges a whole chain of nodes into the chain's last reader.
        for i in reversed(self.alive):
            if self.needed[i] or len(readers[i]) != 1 or not p.recomputable[i]:
                continue
            (reader,) = readers[i]
            if self.savable[i] and self.savable[reader] and p.size[reader] <= p.size[i]:
                self.savable[i] = False
            if not self.savable[i]:
                self.cost[reader] += self.cost[i]
                others = (j for j in self.inputs[reader] if j != i)
                self.inputs[reader] = list(dict.fromkeys((*others, *self.inputs[i])))
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
