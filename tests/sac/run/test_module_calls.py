"""Reports of module calls: names, arguments, cleanup, and other threads."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from remat.sac.run.module_calls import watching


class Seen:
    """Record of the reports."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running: list[str] = []

    def watch(self, *models: nn.Module) -> AbstractContextManager[None]:
        return watching(self.begin, self.end, *models)

    def begin(self, name: str, module: nn.Module) -> None:
        self.events.append(name)
        self.running.append(name)

    def end(self, inputs: Any, out: Any, failed: bool) -> None:
        how = "failed" if failed else f"{len(inputs[0])} args, {', '.join(inputs[1])}"
        assert failed is (out is None)
        self.events.append(f"/{self.running.pop()}: {how}")


class Twice(nn.Module):
    """Module that has one layer at two places, and creates another layer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a

    def forward(self, x: torch.Tensor, *, twice: bool = True) -> torch.Tensor:
        x = self.a(x)
        if not hasattr(self, "late"):
            self.late = nn.ReLU()
        return self.late(self.b(input=x) if twice else x)


@pytest.mark.parametrize("named_before", [True, False])
def test_names_and_arguments(named_before: bool) -> None:
    seen, model = Seen(), Twice()
    with seen.watch(*([model] if named_before else [])):
        model(torch.randn(2), twice=True)
        Twice()(torch.randn(2), twice=False)
        model(torch.randn(2), twice=False)
    once = ["{0}", "{0}.a", "/{0}.a: 1 args, ", "{0}.late", "/{0}.late: 1 args, "]
    twice = [*once[:3], "{0}.a", "/{0}.a: 0 args, input", *once[3:]]
    end = "/{0}: 1 args, twice"
    expected = [line.format("Twice") for line in (*twice, end)]
    expected += [line.format("Twice_1") for line in (*once, end)]
    expected += [line.format("Twice") for line in (*once, end)]
    assert seen.events == expected


def test_a_module_that_calls_itself() -> None:
    class Again(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            return self(x, depth - 1) if depth else x

    seen = Seen()
    with seen.watch():
        Again()(torch.ones(1))
    assert seen.events == ["Again", "Again", "/Again: 2 args, ", "/Again: 1 args, "]


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`"
)  # the warning's category differs between versions
def test_a_module_that_is_scripted_is_not_told_of() -> None:
    seen = Seen()
    with seen.watch():
        nn.Sequential(torch.jit.script(nn.ReLU()))(torch.ones(1))
        torch.jit.script(nn.ReLU())(torch.ones(1))
    assert seen.events == ["Sequential", "/Sequential: 1 args, "]


@pytest.mark.parametrize("within_another", [False, True])
def test_nothing_is_left_behind(within_another: bool) -> None:
    seen, model = Seen(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def fail() -> None:
        try:
            raise KeyError("while this is handled, another one is raised")
        except KeyError:
            with pytest.raises(RuntimeError, match="mat1"), seen.watch():
                model(torch.randn(3))

    if within_another:
        with Seen().watch():
            model(torch.randn(2))
            fail()
    else:
        fail()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not hooks._has_any_global_hook()
    model(torch.randn(2))
    inner = ["Sequential.0", "/Sequential.0: failed"]
    assert seen.events == ["Sequential", *inner, "/Sequential: failed"]


def test_hooks_are_outside_of_forward() -> None:
    seen, model = Seen(), nn.Sequential(nn.ReLU())
    model.register_forward_pre_hook(lambda module, args: seen.events.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.events.append("after"))
    with seen.watch(model):
        model(torch.randn(2))
    inner = ["Sequential.0", "/Sequential.0: 1 args, "]
    assert seen.events == ["before", "Sequential", *inner, "/Sequential: 1 args, ", "after"]


def test_two_threads_that_watch_one_model_end_in_any_order() -> None:
    seen, other, model = Seen(), Seen(), nn.Sequential(nn.ReLU())
    begun, over = threading.Event(), threading.Event()

    def there() -> None:
        with other.watch(model):
            model(torch.ones(1))
            begun.set()
            assert over.wait(10)

    thread = threading.Thread(target=there)
    with seen.watch(model):
        model(torch.ones(1))
        thread.start()
        assert begun.wait(10)
    over.set()
    thread.join()
    events = list(seen.events)
    assert events == other.events
    model(torch.ones(1))
    assert (seen.events, other.events) == (events, events)
