"""Define the base class of cost models, and compute the cost of each node of a graph.

A cost model is an immutable object with a name, a unit and one required method, `CostModel.cost`. Views, tuple
elements, sizes and constants cost nothing under any model, because `node_costs` sets their costs to 0 without calling
the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import fx

from remat.errors import ProblemError, RematError
from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph
from remat.graph.memory.ownership import Storages
from remat.graph.memory.storages import SYMBOLIC, form_of, hint
from remat.graph.memory.writes import aliased_argument
from remat.graph.problems.replays import is_element

_REPORT: ContextVar[Callable[[str], None] | None] = ContextVar("remat_costs_report", default=None)


class CostModel:
    """Base class of cost models.

    A plugin subclasses `CostModel` and returns the subclass from the hook ``remat_cost_models``.

    Attributes:
        name: name of the model, as in ``cost="name"`` or ``cost="name:argument"``.
        unit: unit of the costs, such as ``"ps"``.
        summary: one-line description, which the command ``remat costs`` prints.
        contextual: whether a node's cost also depends on its neighbours: the nodes that it reads
            and the nodes that read it. If False, `node_costs` asks for one cost for all calls with
            the same operator, constants, shapes, strides, dtypes and devices.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    summary: ClassVar[str] = ""
    contextual: ClassVar[bool] = False

    @classmethod
    def parse(cls, argument: str | None) -> CostModel:
        """Build the model from the text after the colon in ``cost="name:argument"``; the text is None without a colon.

        Raises:
            ProblemError: the model does not accept this argument.
        """
        if argument is not None:
            raise ProblemError(
                f"cost model '{cls.name}' takes no argument, got '{argument}'; write '{cls.name}'"
            )
        return cls()

    @classmethod
    def arguments(cls) -> Mapping[str, str]:
        """Return the arguments that ``cost="name:argument"`` accepts, as a dict from argument to description."""
        return {}

    def for_graph(self, joint: JointGraph) -> CostModel:
        """Return the cost model that prices the nodes of one graph; by default this model itself."""
        return self

    def cost(self, node: fx.Node) -> int:
        """Return the cost of running ``node`` once, in the model's ``unit``: 0 or more.

        Args:
            node: a ``call_function`` node whose inputs and result carry ``meta["val"]``.
        """
        raise NotImplementedError

    def costs(self, nodes: Sequence[fx.Node]) -> Sequence[int]:
        """Return the costs of several nodes of one graph, in the order of the nodes.

        Override `costs` if the model prices many nodes together faster than one by one.
        """
        return [self.cost(node) for node in nodes]

    def fallbacks(self, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
        """After a call of `costs`, describe the nodes for which the model used another cost model as a fallback.

        Returns:
            By default, an empty tuple. A model returns one line for each distinct call, in the order of ``nodes``, or
            one line for the whole graph. Each line has the reason and the fallback.
        """
        return ()

    def key(self) -> str:
        """Return a text that identifies the model in cache keys.

        Two models with equal texts give equal costs for the same graph.
        """
        return str(self)

    def __str__(self) -> str:
        """Return the model's name and argument as in ``cost="name:argument"``."""
        return self.name


@contextlib.contextmanager
def reporting(callback: Callable[[str], None]) -> Iterator[None]:
    """Pass progress messages of slow cost models to ``callback`` inside of a ``with`` block."""
    token = _REPORT.set(callback)
    try:
        yield
    finally:
        _REPORT.reset(token)


def report(text: str) -> None:
    """Pass a progress message to the callback of `reporting`, if there is one."""
    callback = _REPORT.get()
    if callback is not None:
        callback(text)


def node_costs(
    index: GraphIndex,
    storages: Storages,
    model: CostModel,
    positions: Iterable[int] | None = None,
) -> list[int]:
    """Return the cost of each node of a graph.

    Args:
        index: the graph's nodes, numbered in graph order.
        storages: storages of the values in the graph.
        model: the cost model.
        positions: positions of the nodes to price; other nodes cost 0. None prices all nodes.

    Returns:
        One cost per position, in the model's unit. Views, in-place operators, tuple elements,
        sizes, constants and placeholders cost 0.

    Raises:
        ProblemError: the model raises, or returns a cost that is not a finite number of 0 or more.
            The message names the model, and the node if the model prices nodes one by one.
    """
    forms = Forms()
    alike: dict[Any, list[int]] = {}  # positions of identical calls
    for i in range(len(index)) if positions is None else positions:
        node = index.nodes[i]
        # A node that does not own its storage is a view, or writes in place. Both count as free.
        if node.op != "call_function" or storages.owner[i] != i or _is_free(node):
            continue
        # The cost of a higher-order operator depends on the graphs that it calls, not on neighbours.
        by_neighbours = model.contextual and (index.plain[i] or not _bodies(node))
        alike.setdefault(i if by_neighbours else signature_of(node, forms), []).append(i)
    prices = _prices(model, [index.nodes[same[0]] for same in alike.values()])
    costs = [0] * len(index)
    for same, cost in zip(alike.values(), prices, strict=True):
        for i in same:
            costs[i] = cost
    return costs


def _prices(model: CostModel, nodes: Sequence[fx.Node]) -> list[int]:
    """Return the cost of each node under a model, including graphs that the node calls as a higher-order operator."""
    called = [_bodies(n) for n in nodes]
    answers = iter(_ask(model, [n for n, bodies in zip(nodes, called, strict=True) if not bodies]))
    return [
        _nested_cost(model, n, bodies) if bodies else next(answers)
        for n, bodies in zip(nodes, called, strict=True)
    ]


def _bodies(node: fx.Node) -> list[list[fx.Node]]:
    """Return the call nodes of each graph that a higher-order operator calls, one list per graph."""
    graphs = ops.subgraphs(node)
    # PyTorch has a FLOP formula for `flex_attention`. Its graphs only change or mask single scores.
    if graphs and "flex_attention" in str(node.target):
        return []
    return [
        [
            n
            for n in module.graph.nodes
            if n.op == "call_function" and not _is_free(n) and aliased_argument(n) is None
        ]
        for module in graphs
    ]


def _nested_cost(model: CostModel, node: fx.Node, called: Sequence[Sequence[fx.Node]]) -> int:
    """Return the cost of a higher-order operator, from the costs of the graphs that it calls."""
    each = [sum(_prices(model, body)) for body in called]
    # Of the branches of a `cond`, only one runs, at worst the most expensive.
    once = max(each) if node.target is torch.ops.higher_order.cond else sum(each)
    return once * _rounds(node)


def _rounds(node: fx.Node) -> int:
    """Return how many times a higher-order operator, such as a scan, calls its graph; 1 if unknown."""
    name = str(node.target)
    # A loop with an unknown number of iterations counts as one iteration.
    if name not in ("scan", "map_impl"):
        return 1
    sequences: Any = node.args[2 if name == "scan" else 1]
    first = next(iter(sequences), None) if isinstance(sequences, (tuple, list)) else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    return hint(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else 1


def _ask(model: CostModel, nodes: list[fx.Node]) -> list[int]:
    """Return a model's costs of nodes, checked and converted to integers; raise `ProblemError` if the model raises."""
    # Unless the model overrides `costs`, nodes are priced one by one, so that an error can name the node.
    one_by_one = type(model).costs is CostModel.costs
    answers: list[Any] = []
    for group in [[n] for n in nodes] if one_by_one else [nodes]:
        try:
            answers += model.costs(group)
        except RematError:
            raise
        except Exception as error:  # the model may come from a plugin, which may raise anything
            where = f" for '{group[0].name}' ({group[0].target})" if one_by_one else ""
            raise ProblemError(
                f"cost model '{model}' raised {type(error).__name__}{where}: {error}"
            ) from error
    if len(answers) != len(nodes):
        raise ProblemError(
            f"cost model '{model}' gave {len(answers)} costs for {len(nodes)} nodes; "
            f"{type(model).__name__}.costs must return one for each, in order"
        )
    return [_check_cost(model, n, cost) for n, cost in zip(nodes, answers, strict=True)]


def _check_cost(model: CostModel, node: fx.Node, cost: Any) -> int:
    """Return a model's cost of a node as an int, rounded up; raise `ProblemError` unless it is finite and 0 or more."""
    number = isinstance(cost, Real) and not isinstance(cost, bool)
    if not number or not math.isfinite(cost) or cost < 0:
        raise ProblemError(
            f"cost model '{model}' says that '{node.name}' ({node.target}) costs {cost!r}; "
            "expected a finite number of 0 or more"
        )
    integer = int(cost)  # exact for integers of any kind
    return integer if integer == cost else math.ceil(cost)


def _is_free(node: fx.Node) -> bool:
    """Return whether a node takes an element of a tuple or computes a size, which costs nothing."""
    return is_element(node) or isinstance(node.meta.get("val"), (*SYMBOLIC, int, float))


class Forms(dict[int, bytes]):
    """A dict from ``id`` of a value to a number; values of equal sizes, strides, dtypes and devices share a number."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, bytes] = {}

    def of(self, node: fx.Node) -> bytes:
        """Return the number for the form of a node's value, as `bytes`: no constant among arguments has this type."""
        has_value = "val" in node.meta
        value = node.meta["val"] if has_value else node
        number = self.get(id(value))
        if number is None:
            # A subgraph or a constant has no value, only a name.
            form = _form_of(value) if has_value else (node.op, str(node.target))
            number = self[id(value)] = self._numbers.setdefault(form, b"%d" % len(self._numbers))
        return number


def signature_of(node: fx.Node, forms: Forms) -> Any:
    """Return a hashable key of a call's operator, constants and input forms; calls with equal keys cost the same."""
    reads: list[fx.Node] = []

    def described(read: fx.Node) -> bytes:
        reads.append(read)
        return forms.of(read)

    args = repr(fx.map_arg(node.args, described))
    kwargs = repr(fx.map_arg(node.kwargs, described)) if node.kwargs else ""
    # `x + x` and `x + y` read different amounts of memory.
    distinct = dict.fromkeys(reads)
    repeated = None if len(distinct) == len(reads) else tuple(map([*distinct].index, reads))
    # Operators are keyed by identity, because hashing an overload takes longer.
    return (id(node.target), args, kwargs, repeated)


def _form_of(value: Any) -> Any:
    """Return a hashable description of a value: sizes, strides, dtype and device of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return form_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_form_of, value))
    return repr(value)
