"""Memory of optimizers traced on fake parameters, compared with real steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from remat.errors import ProblemError
from remat.running.measure import StorageTracker
from remat.running.optimizer import read_optimizer, trace_optimizer

SHAPES = ((64, 32), (32,), (8, 64), (16, 4, 3))
TRACED = (
    "adamw",
    "adam:amsgrad=True",
    "adamw:foreach=True",
    "sgd",
    "sgd:momentum=0.9,nesterov=True",
    "sgd:momentum=0.9,foreach=True",
    "adafactor",
    "rmsprop:centered=true",
    "adagrad",
    "adadelta",
    "adamax",
    "nadam",
    "radam",
    "asgd",
    "rprop",
)


def parameters() -> list[torch.Tensor]:
    return [torch.randn(s, requires_grad=True) for s in SHAPES]


def really(optimizer: str) -> tuple[int, int]:
    """Return the state bytes and the temporary bytes of a step on real parameters."""
    made = [nn.Parameter(p.detach()) for p in parameters()]
    tracker = StorageTracker()
    for parameter in made:
        tracker.add(parameter)
    own = tracker.current
    running = read_optimizer(optimizer)[1](made)
    most = 0
    with tracker:
        for _ in range(3):
            for parameter in made:
                parameter.grad = torch.randn_like(parameter)
            tracker.peak = tracker.current
            running.step()
            most = max(most, tracker.peak)
            running.zero_grad()
    state = tracker.current - own
    return state, most - 2 * own - state


@pytest.mark.parametrize("optimizer", TRACED)
def test_a_traced_optimizer_takes_what_a_real_one_takes(optimizer: str) -> None:
    traced = trace_optimizer(optimizer, parameters())
    assert (traced.state_bytes, traced.step_bytes) == really(optimizer)


def test_what_is_moved_is_counted_by_hand() -> None:
    """SGD reads parameter and gradient and writes the parameter; momentum is read and written twice."""
    nbytes = sum(p.nbytes for p in parameters())
    assert trace_optimizer("sgd", parameters()).moved_bytes == 3 * nbytes
    momentum = trace_optimizer("sgd:momentum=0.9", parameters()).moved_bytes
    assert momentum == (2 + 3 + 3) * nbytes  # times 0.9, plus the gradient, onto the parameter


def test_parameters_without_a_gradient_have_no_state() -> None:
    whole = trace_optimizer("adamw", parameters()).state_bytes
    without = trace_optimizer("adamw", parameters(), without_gradient=frozenset({0})).state_bytes
    assert whole - without == 2 * 4 * 64 * 32 + 4


def test_on_a_gpu_it_works_on_all_parameters_at_once() -> None:
    """The foreach implementation copies all parameters, and the loop copies one at a time."""
    many = [torch.randn(16, 16, requires_grad=True) for _ in range(20)]
    alone, at_once = (trace_optimizer("adamw", many, foreach=f) for f in (False, True))
    asked = trace_optimizer("adamw:foreach=True", many)
    refused = trace_optimizer("adamw:foreach=False", many, foreach=True)
    assert at_once.step_bytes == asked.step_bytes == sum(p.nbytes for p in many)
    assert alone.step_bytes == refused.step_bytes < at_once.step_bytes
    # Adafactor has a foreach implementation, but does not select it by default.
    own, other = (trace_optimizer("adafactor", many, foreach=f) for f in (False, True))
    assert own.step_bytes == other.step_bytes


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, partial(torch.optim.AdamW, lr=1.0), lambda p: torch.optim.AdamW(p, lr=1)],
)
def test_what_makes_an_optimizer_is_taken(make: Any) -> None:
    expected = trace_optimizer("adamw", parameters())
    assert trace_optimizer(make, parameters()).state_bytes == expected.state_bytes


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("adamv", "torch.optim has no 'adamv'; did you mean 'adam'"),
        ("optimizer", "torch.optim has no 'optimizer'"),
        ("sgd:0.9", "cannot be read; expected key=value"),
        ("sgd:momentum=", "cannot be read"),
        ("sgd:speed=3", "cannot be traced: TypeError"),
        ("lbfgs", "cannot be traced: TypeError: LBFGS.step"),
        ("sparseadam", "cannot be traced: RuntimeError: SparseAdam"),
        (3, "optimizer is a int"),
        (lambda p: 3, "no torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_traced_is_told_in_one_line(optimizer: Any, says: str) -> None:
    with pytest.raises(ProblemError) as caught:
        trace_optimizer(optimizer, parameters())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "adamw" in str(caught.value) or "momentum" in str(caught.value)
