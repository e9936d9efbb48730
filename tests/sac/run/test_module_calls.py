"""Which modules are told apart, by which names, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from remat.sac.run.module_calls import ModuleCall, watching


class Seen:
    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, call: ModuleCall) -> Any:
        self.events.append(f"{call.name}({len(call.args)}, {', '.join(call.kwargs)})")
        return call.run()


class Twice(nn.Module):
    """The same layer at two places, and one that is made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a

    def forward(self, x: torch.Tensor, *, twice: bool = True) -> torch.Tensor:
        x = self.a(x)
        if not hasattr(self, "late"):
            self.late = nn.ReLU()
        return self.late(self.b(input=x) if twice else x)


def test_names_and_arguments() -> None:
    seen, model = Seen(), Twice()
    with watching(seen):
        model(torch.randn(2), twice=True)
        Twice()(torch.randn(2), twice=False)
    assert seen.events == [
        "Twice(1, twice)",
        "Twice.a(1, )",
        "Twice.a(0, input)",
        "Twice.late(1, )",
        "Twice_1(1, twice)",
        "Twice_1.a(1, )",
        "Twice_1.late(1, )",
    ]


def test_nothing_is_left_behind() -> None:
    seen, model = Seen(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    plain = nn.Module.__call__
    own = model[1].forward
    model[1].__dict__["forward"] = own
    with pytest.raises(RuntimeError, match="mat1"), watching(seen):
        model(torch.randn(3))
    assert nn.Module.__call__ is plain
    assert [m.__dict__.get("forward") for m in model.modules()] == [None, None, own]
    model(torch.randn(2))
    assert seen.events == ["Sequential(1, )", "Sequential.0(1, )"]


def test_a_forward_that_was_put_there_meanwhile_stays() -> None:
    model = nn.Sequential(nn.ReLU())
    with watching(Seen()):
        model(torch.randn(2))
        model.__dict__["forward"] = replacement = model[0].forward
    assert model.__dict__["forward"] is replacement


def test_hooks_are_outside_of_forward() -> None:
    seen, model = Seen(), nn.Sequential(nn.ReLU())
    model.register_forward_pre_hook(lambda module, args: seen.events.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.events.append("after"))
    with watching(seen):
        model(torch.randn(2))
    assert seen.events == ["before", "Sequential(1, )", "Sequential.0(1, )", "after"]
