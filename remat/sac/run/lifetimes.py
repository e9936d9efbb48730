"""When the storages of one training step are made and freed, and which module was running meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from remat.sac.run.operators import tensors_in
from remat.sac.run.recording import Call, ModuleSpan, StepRecorder

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lifetimes:
    """One training step: each storage with its size and its life, and all calls of modules.

    Moments, storages and spans are those of `StepRecorder`.

    Attributes:
        moments: how many there are.
        born: by storage; below 0 if it was there before.
        died: by storage; ``moments`` if it was there at the end.
        nbytes: by storage.
        resident: storages of parameters.
        gradients: storages of their gradients.
        calls: operators of forward.
        spans: calls of modules in the order in which they began.
        forward_end: the first moment of backward.
        written: storage to the last moment at which an operator wrote to it.
    """

    moments: int
    born: Ints
    died: Ints
    nbytes: Ints
    resident: frozenset[int]
    gradients: frozenset[int]
    calls: tuple[Call, ...]
    spans: tuple[ModuleSpan, ...]
    forward_end: int
    written: dict[int, int]

    @classmethod
    def of(cls, recorder: StepRecorder, model: nn.Module, forward_end: int) -> Lifetimes:
        """What was recorded of a step of a model that has just ended."""
        died = np.array(recorder.died, dtype=np.int64)
        parameters = list(model.parameters())
        return cls(
            moments=recorder.now,
            born=np.array(recorder.born, dtype=np.int64),
            died=np.where(died < 0, recorder.now, died),
            nbytes=np.array(recorder.nbytes, dtype=np.int64),
            resident=recorder.known(parameters),
            gradients=recorder.known(p.grad for p in parameters if p.grad is not None),
            calls=tuple(recorder.calls),
            spans=tuple(recorder.spans),
            forward_end=forward_end,
            written=dict(recorder.written),
        )

    def alive(self, chosen: Iterable[int]) -> Ints:
        """Bytes alive of some storages, by moment."""
        at = np.fromiter(chosen, dtype=np.int64)
        change = np.zeros(self.moments + 1, dtype=np.int64)
        np.add.at(change, np.maximum(self.born[at], 0), self.nbytes[at])
        np.subtract.at(change, self.died[at], self.nbytes[at])
        return np.cumsum(change)[:-1]

    @functools.cached_property
    def total(self) -> Ints:
        """Bytes alive by moment."""
        return self.alive(range(len(self.born)))

    def made(self, span: ModuleSpan) -> Ints:
        """Storages that were made in a call of a module."""
        return np.flatnonzero((self.born >= span.begin) & (self.born < span.end))

    def operators(self, span: ModuleSpan) -> list[Call]:
        """What ran in a call of a module, without what checkpointing passes over."""
        return [call for call in self.calls[span.first : span.last] if not call.skipped]


def given_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that are there before a step: parameters, buffers and inputs."""
    return [*model.parameters(), *model.buffers(), *tensors_in((tuple(args), kwargs))]


def loss_only(model: Callable[..., Any]) -> Callable[..., Any]:
    """The same model; where its output has a ``loss``, nothing else of it requires a gradient."""

    def step(*args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return out
        return loss, [t.detach() for t in tensors_in(out)]

    return step
