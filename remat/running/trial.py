"""Run a joint graph, or its forward and backward graphs, on the same random inputs."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from remat.errors import ProblemError
from remat.graph.joint import JointGraph, outputs_of, role_of
from remat.graph.memory.storages import SYMBOLIC, storage_bytes
from remat.graph.ops import attribute_of
from remat.running.random_values import RealValues
from remat.torch_compat import pytree
from remat.units import format_bytes

#: Default limit in bytes on all inputs of a trial together, and on every single value.
MAX_BYTES = 2**30
#: Lock that a run holds, because `_deterministic` changes settings of the whole process.
_ONE_TRIAL = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """Random inputs on which a joint graph, or its forward and backward graphs, can be run.

    Every run starts from copies of the same inputs and from the same generator state, and uninitialised
    memory is filled with NaN. If two runs on one `Trial` have different results, the graphs that were
    run differ.

    Attributes:
        inputs: dict from the target of each placeholder to a real value.
        constants: dict from the attribute name of each constant of the module to a real tensor.
        seed: seed of the inputs' random numbers, and of the generator in every run.
    """

    inputs: Mapping[str, Any]
    constants: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, joint: JointGraph, *, seed: int = 0, max_bytes: int = MAX_BYTES) -> Trial:
        """Create random inputs for a joint graph, in which each symbolic size has the value that was traced.

        Floating-point inputs are normally distributed. Integer inputs are 0 or 1, so that they are
        valid indices.

        Args:
            joint: the joint graph.
            seed: seed of the random numbers.
            max_bytes: limit in bytes on all inputs together, and on every single value of the graph.

        Raises:
            ProblemError: the graph is too large, has data-dependent sizes, or needs a device that is missing.
        """
        _check(joint, max_bytes)
        maker = RealValues(seed)
        inputs = {
            str(n.target): maker.make(n.meta.get("val"), str(n.target))
            for n in joint.graph.nodes
            if n.op == "placeholder"
        }
        constants = {
            str(n.target): maker.make(attribute_of(joint.graph_module, n.target), str(n.target))
            for n in joint.graph.nodes
            if n.op == "get_attr" and n.users
        }
        return cls(inputs=inputs, constants=constants, seed=seed)

    def run_joint(self, joint: JointGraph) -> dict[str, Any]:
        """Run a joint graph, and return the outputs, gradients, changed inputs and generator state by name."""
        n = joint.num_fwd_outputs
        with self._set_up() as (inputs, constants):
            returned = _run(joint.graph_module, partial(self._input, inputs), constants)
            return _results(returned[:n], returned[n:], inputs)

    def run_graphs(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
    ) -> dict[str, Any]:
        """Run a forward graph, then a backward graph on the values that forward saves for backward.

        An input of backward is the value that forward saves under the input's name, or a random
        tangent.

        Args:
            forward: the forward module.
            backward: the backward module.
            num_fwd_outputs: number of the user's outputs, which come before the saved values.

        Returns:
            A dict with the results by name, as `run_joint` returns.

        Raises:
            ProblemError: backward needs a value that forward does not save.
        """
        with self._set_up() as (inputs, constants):
            returned = _run(forward, partial(self._input, inputs), constants)
            n = num_fwd_outputs
            nodes = outputs_of(forward.graph)[n:]
            saved = {x.name: value for x, value in zip(nodes, returned[n:], strict=True)}

            def value_of(placeholder: fx.Node) -> Any:
                if placeholder.name in saved:
                    return saved[placeholder.name]
                if not role_of(placeholder).in_backward:
                    raise ProblemError(
                        f"backward reads '{placeholder.name}', which forward does not hand over"
                    )
                return self._input(inputs, placeholder)

            return _results(returned[:n], _run(backward, value_of, constants), inputs)

    def _input(self, inputs: Mapping[str, Any], placeholder: fx.Node) -> Any:
        """Return a placeholder's random value; raise a ProblemError if the joint graph has no such placeholder."""
        name = str(placeholder.target)
        if name not in inputs:
            raise ProblemError(
                f"input '{name}' is no placeholder of the joint graph, so there is no number for it"
            )
        return inputs[name]

    @contextlib.contextmanager
    def _set_up(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """In a ``with`` block, seed generators, make operators deterministic, and yield copied inputs and constants."""
        # Copied together, so that copies of tensors on one storage share a storage too.
        inputs, constants = copy.deepcopy((dict(self.inputs), dict(self.constants)))
        devices = {v.device for v in inputs.values() if isinstance(v, torch.Tensor)}
        cuda = sorted(d.index or 0 for d in devices if d.type == "cuda")
        with _deterministic(), torch.random.fork_rng(devices=cuda), torch.no_grad():
            torch.manual_seed(self.seed)
            yield inputs, constants


def _check(joint: JointGraph, max_bytes: int) -> None:
    """Raise a ProblemError if a graph is too large to run, or has a size that depends on data."""
    total = 0
    for node in joint.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            is_symbolic = isinstance(value, (torch.Tensor, *SYMBOLIC))
            if is_symbolic and free_unbacked_symbols(value):
                raise ProblemError(
                    f"'{node.name}' has a size that depends on data, so random inputs cannot stand "
                    "for real ones; check the structure only"
                )
            if not isinstance(value, torch.Tensor):
                continue
            nbytes = storage_bytes(value)
            total += nbytes if node.op in ("placeholder", "get_attr") else 0
            if max(nbytes, total) > max_bytes:
                subject = "the inputs take" if total > max_bytes else f"'{node.name}' takes"
                raise ProblemError(
                    f"to run graph '{joint.name}', {subject} {format_bytes(max(nbytes, total))}; at most "
                    f"{format_bytes(max_bytes)} are allocated for that: check a smaller configuration "
                    "of the model, or the structure only"
                )


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Make operators deterministic inside the ``with`` block, and fill uninitialised memory with NaN."""
    with _ONE_TRIAL, warnings.catch_warnings():
        before = torch.are_deterministic_algorithms_enabled()
        only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
        threads = torch.get_num_threads()
        warnings.simplefilter("ignore")
        # Operators without a deterministic kernel still run; their warnings are ignored here.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(1)  # several threads may add numbers in different orders
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(before, warn_only=only_warn)


#: Dict from the name of an Inductor operator that draws random numbers from a seed, to the position of
#: the seed among its arguments. The eager kernels of these operators ignore the seed and draw from the
#: generator, whose state differs between forward and backward.
_SEEDED = {"prims.inductor_random.default": 1, "prims.inductor_randint.default": 3}


class _Interpreter(fx.Interpreter):
    """Interpreter that runs the nodes of a graph one by one, with real tensors in place of fake constants."""

    def __init__(self, module: fx.GraphModule, constants: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._constants = constants

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        position = _SEEDED.get(str(target))
        if position is None:
            return super().call_function(target, args, kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(args[position]))
            return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) in self._constants:
            return self._constants[str(target)]
        return super().get_attr(target, args, kwargs)


def _run(
    module: fx.GraphModule, value_of: Callable[[fx.Node], Any], constants: Mapping[str, Any]
) -> list[Any]:
    """Run a graph on the values of its placeholders, and return its results as a flat list."""
    args = [value_of(node) for node in module.graph.nodes if node.op == "placeholder"]
    returned = _Interpreter(module, constants).run(*args, enable_io_processing=False)
    return pytree.tree_leaves(returned)


def _results(outputs: list[Any], gradients: list[Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's outputs, gradients, inputs after the run, and the CPU generator's state, as a dict by name."""
    results = {f"output {i}": v for i, v in enumerate(outputs)}
    results |= {f"gradient {i}": v for i, v in enumerate(gradients)}
    results |= {f"input '{name}' afterwards": v for name, v in inputs.items()}
    results["the state of the generator"] = torch.get_rng_state()
    return results
