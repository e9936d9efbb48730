"""Lifetimes of the storages that are alive in one training step, with the module calls of this step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from remat.sac.run.operators import tensors_in
from remat.sac.run.recording import Call, ModuleSpan, StepRecorder

Ints = npt.NDArray[np.int64]


class Lifetimes:
    """Sizes and lifetimes of the storages of one recorded training step.

    Build a `Lifetimes` object directly after the step, while the model's parameters hold the step's gradients.
    `StepRecorder` defines program points and the numbers of storages, which are the indices of the arrays.

    Attributes:
        recorder: recorder of the step.
        born: program point at which each storage is allocated; below 0 if it existed before the step.
        died: program point at which each storage is freed; the number of program points if it is alive at the end of
            the step.
        nbytes: bytes of each storage.
        resident: storages of the parameters.
        gradients: storages of the parameters' gradients.
        forward_end: first program point of backward.
    """

    def __init__(self, recorder: StepRecorder, model: nn.Module, forward_end: int) -> None:
        parameters = list(model.parameters())
        died = np.array(recorder.died, dtype=np.int64)
        self.recorder = recorder
        # The lists are copied, because storages that are freed after the step still change the recorder's lists.
        self.born = np.array(recorder.born, dtype=np.int64)
        self.died: Ints = np.where(died < 0, recorder.now, died)
        self.nbytes = np.array(recorder.nbytes, dtype=np.int64)
        self.resident = recorder.numbers_of(parameters)
        self.gradients = recorder.numbers_of(p.grad for p in parameters if p.grad is not None)
        self.forward_end = forward_end

    def alive(self, numbers: Iterable[int]) -> Ints:
        """Return the bytes alive at each program point, summed over the storages with the given numbers."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        change = np.zeros(self.recorder.now + 1, dtype=np.int64)
        # change[...] += … would count a program point that occurs several times only once. The maximum with 0 is
        # taken, because storages from before the step have a negative program point of allocation.
        np.add.at(change, np.maximum(self.born[chosen], 0), self.nbytes[chosen])
        np.subtract.at(change, self.died[chosen], self.nbytes[chosen])
        return np.cumsum(change)[:-1]

    @functools.cached_property
    def total(self) -> Ints:
        """Bytes of all storages that are alive at each program point."""
        return self.alive(range(len(self.born)))

    def allocated_in(self, span: ModuleSpan) -> Ints:
        """Return the numbers of the storages allocated during the forward of a module call."""
        return np.flatnonzero((self.born >= span.begin) & (self.born < span.end))

    def operators(self, span: ModuleSpan) -> list[Call]:
        """Return the operators that ran in a module call, without those that checkpointing ignores."""
        return [call for call in self.recorder.calls[span.first : span.last] if not call.skipped]


def given_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that exist before a step: parameters, buffers and inputs."""
    return [*model.parameters(), *model.buffers(), *tensors_in((tuple(args), kwargs))]


def loss_only(model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model, so that backward starts from the loss if the model's output contains a loss.

    If the output has a ``loss`` that requires a gradient, the wrapper returns a pair: the loss, and all tensors of the
    output, detached. Without such a loss, the wrapper returns the model's output unchanged.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return out
        # All tensors are returned, detached, because a user's step keeps the whole output alive during backward.
        return loss, [t.detach() for t in tensors_in(out)]

    return step
