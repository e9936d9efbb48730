"""Create random real values with the shapes of fake values; real tensors share memory where the fake tensors do."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import fx

from remat.errors import ProblemError, first_line
from remat.graph.memory.storages import hint, storage_bytes, storage_key


class RealValues:
    """Creator of random real values for fake values; fake tensors on one storage become real tensors on one storage.

    Args:
        seed: seed of the random numbers. Equal seeds give equal values to graph inputs of equal names.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._storages: dict[int, torch.Tensor] = {}

    def make(self, value: Any, name: str) -> Any:
        """Return a real value in place of a fake tensor or symbolic number; other values are unchanged.

        Args:
            value: the fake tensor, symbolic number or other value. For a symbolic number, its hint is returned.
            name: name of the graph input that has the value, for messages and the seed.

        Raises:
            ProblemError: no random value can be made of this type, layout or device.
        """
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            return type(value.node.pytype(0))(hint(value))
        if isinstance(value, torch.SymFloat):
            return float(value.node.hint)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name) if hasattr(value, "fake_mode") else value
        if isinstance(value, fx.GraphModule):
            return self._module(value, name)
        if value is None or isinstance(value, (int, float, bool, str)):
            return value
        raise ProblemError(
            f"input '{name}' is a {type(value).__name__}, for which there is no random value; check "
            "the structure only"
        )

    def _module(self, module: fx.GraphModule, name: str) -> fx.GraphModule:
        """Return a higher-order operator's graph, or a copy in which random real tensors replace its fake constants."""
        fake = [
            n
            for n in module.graph.nodes
            if n.op == "get_attr" and hasattr(getattr(module, str(n.target), None), "fake_mode")
        ]
        if not fake:
            return module
        copied = fx.GraphModule(module, module.graph)
        for node in fake:
            constant = getattr(module, str(node.target))
            setattr(copied, str(node.target), self.make(constant, f"{name}.{node.target}"))
        return copied

    def _tensor(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Return a random real tensor with the sizes, strides, dtype and device of a fake tensor."""
        if value.layout is not torch.strided:
            raise ProblemError(
                f"input '{name}' has the layout {value.layout}, for which there are no random "
                "values; check the structure only"
            )
        key = storage_key(value)
        memory = self._storages.get(key) if key is not None else None
        if memory is None:
            count = -(-storage_bytes(value) // value.element_size())
            # crc32, because the hash of a str differs from process to process.
            memory = _numbers(count, value.dtype, self._seed ^ zlib.crc32(name.encode()))
            try:
                memory = memory.to(value.device)
            except (RuntimeError, AssertionError) as error:
                raise ProblemError(
                    f"input '{name}' lies on '{value.device}', which is not here "
                    f"({first_line(error)}); check the structure only"
                ) from None
            if key is not None:
                self._storages[key] = memory
        sizes, strides = ([hint(s) for s in x] for x in (value.shape, value.stride()))
        # Two tensors on one storage may differ in dtype; the stored values have the dtype of the first one.
        base = memory if memory.dtype == value.dtype else memory.view(torch.uint8).view(value.dtype)
        return base.as_strided(sizes, strides, hint(value.storage_offset()))


def _numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return ``count`` random numbers: floats are normally distributed, and integers and booleans are 0 or 1."""
    # On the CPU, so that all devices get equal numbers.
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(count, dtype=torch.complex128, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 2, (count,), generator=generator).to(dtype)
