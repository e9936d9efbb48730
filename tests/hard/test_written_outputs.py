"""Outputs that are written to between forward and backward, which may read them again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import RereadError
from remat.graph.joint import outputs_of
from remat.torch_compat import functorch_config, inductor_config
from tests.e2e.doors import aot

T = torch.Tensor


class Language(nn.Module):
    """Returns a loss and logits, as language models do; eager autograd does not save these logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, ids: T) -> Any:
        logits = self.head(self.embedding(ids).tanh())
        return self.returned(logits.exp().mean(), logits)

    def returned(self, loss: T, logits: T) -> Any:
        return loss, logits


class Views(Language):
    """Returns views of the logits, too."""

    def returned(self, loss: T, logits: T) -> Any:
        return loss, logits, logits.detach(), logits[:, 1:].transpose(1, 2)


class Chunks(Language):
    """Returns views alone: what they lie in is not an output."""

    def returned(self, loss: T, logits: T) -> Any:
        first, second = logits.detach().chunk(2, -1)
        return loss, first, second, logits.transpose(1, 2)


class Stored(nn.Module):
    """Returns what eager autograd saves: a write to it is an error in eager PyTorch as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(9, 9)

    def forward(self, ids: T) -> Any:
        hidden = self.head(ids / 64).exp()
        return (hidden * hidden).sum(), hidden


class Squared(Language):
    """Returns the logits, which eager autograd saves: a write to them is an error in eager PyTorch."""

    def forward(self, ids: T) -> Any:
        logits = self.head(self.embedding(ids).tanh())
        return self.returned(logits.square().mean(), logits)


class Pieces(Language):
    """Returns pieces of the logits, of which autograd does not know that they lie in one memory."""

    def returned(self, loss: T, logits: T) -> Any:
        return loss, *torch.unsafe_chunk(logits, 2, -1)


def by_detach(out: Any) -> None:
    out[1].detach().div_(0.7)


def by_view(out: Any) -> None:
    out[3].detach().mul_(2)


def by_numpy(out: Any) -> None:
    array = out[1].detach().numpy()
    array *= 0.5


def nothing(out: Any) -> None:
    pass


def gradients(model: nn.Module, f: Callable[..., Any], write: Callable[[Any], None]) -> list[T]:
    model.zero_grad()
    out = f(torch.arange(72).view(8, 9) % 64)
    write(out)
    out[0].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("kind", "write", "budget", "lower"),
    [
        (Language, by_detach, 0, "eager"),
        (Language, by_detach, 1, "eager"),
        (Views, by_view, 0.5, "eager"),
        (Views, by_view, 0.5, "inductor"),
    ],
)
def test_with_reread_inputs_false_writes_change_nothing(
    kind: type[Language], write: Callable[[Any], None], budget: float, lower: str
) -> None:
    model = kind()
    options = {"budget": budget, "lower": lower, "reread_inputs": False}
    f = torch.compile(model, backend="remat", options=options, fullgraph=True)
    expected = gradients(model, model, nothing)
    for written in (nothing, write, by_numpy):
        found = gradients(model, f, written)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert remat.plans()[-1].reread_outputs == ()


def test_a_write_to_what_is_read_again_is_refused_by_name() -> None:
    model = Language()
    f = torch.compile(model, backend="remat", options={"budget": 0.5, "lower": "eager"})
    expected = gradients(model, model, nothing)
    torch.testing.assert_close(gradients(model, f, nothing), expected, rtol=1e-5, atol=1e-7)
    assert remat.plans()[-1].reread_outputs == (1,)
    assert "reads outputs in backward (at 1)" in remat.plans()[-1].explain()
    with pytest.raises(RereadError, match=r"output 1 of .*float32\[8, 9, 64\].* clone"):
        gradients(model, f, by_detach)
    torch.testing.assert_close(gradients(model, f, nothing), expected, rtol=1e-5, atol=1e-7)


def test_views_are_refused_too_and_a_loss_may_be_scaled() -> None:
    model = Views()
    f = torch.compile(model, backend="remat", options={"budget": 0.5, "lower": "eager"})
    with pytest.raises(RereadError):
        gradients(model, f, by_view)
    expected = [g / 4 for g in gradients(model, model, nothing)]
    found = gradients(model, f, lambda out: out[0].div_(4))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "write", "options", "by"),
    [
        (Language, by_detach, {"budget": 0}, "aot"),
        (Language, by_detach, {"budget": 1}, "aot"),
        (Views, by_view, {"budget": 0.5}, "aot"),
        (Chunks, by_detach, {"budget": 0.5}, "inductor"),
        # What is saved may have another version than the output that lies in its memory.
        *(
            (kind, by_detach, {"budget": 0.5, "reread_inputs": reread}, "aot")
            for kind in (Squared, Pieces)
            for reread in (True, False)
        ),
    ],
)
def test_a_partitioner_by_itself_hands_out_copies(
    kind: type[Language], write: Callable[[Any], None], options: dict[str, Any], by: str
) -> None:
    """There is nobody who would notice the write."""
    model, partition = kind(), remat.partitioner(**options)
    given = {"custom_partitioner_fn": partition} if by == "inductor" else {}
    with inductor_config.patch(given), functorch_config.patch(enable_autograd_cache=False):
        f = torch.compile(model, backend="inductor" if by == "inductor" else aot(partition))
        expected = gradients(model, model, nothing)
        for written in (nothing, write, by_numpy):
            found = gradients(model, f, written)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    plan = remat.plans()[-1]
    assert plan.reread_outputs == ()
    assert plan.copied_outputs or options["budget"] == 1 or not options.get("reread_inputs", True)
    assert not plan.copied_outputs or "returns copies of outputs (at 1" in plan.explain()


def test_what_no_view_hides_is_returned_itself() -> None:
    """Autograd sees a write to what is saved itself, and such outputs cost nothing to keep."""
    model = Stored()
    f = torch.compile(model, backend=aot(remat.partitioner(0)))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        gradients(model, f, by_detach)
    assert remat.plans()[-1].copied_outputs == ()


def test_a_saved_plan_returns_the_same_copies() -> None:
    model = Language()
    f = torch.compile(model, backend=aot(remat.partitioner(0.5)))
    expected = gradients(model, f, by_detach)
    plan = remat.Plan.from_json(remat.plans()[-1].to_json())
    assert plan.copied_outputs == (1,)
    for backend in (aot(remat.partitioner(plan=plan)), "remat"):
        torch.compiler.reset()
        options = {"options": {"plan": plan, "lower": "eager"}} if backend == "remat" else {}
        f = torch.compile(model, backend=backend, **options)
        torch.testing.assert_close(gradients(model, f, by_detach), expected)
        assert remat.plans()[-1].copied_outputs == (1,)
        assert remat.plans()[-1].saved_bytes == plan.saved_bytes


def test_what_eager_pytorch_refuses_is_refused() -> None:
    model = Stored()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        gradients(model, model, by_detach)
    for reread in (True, False):
        options = {"budget": 1, "lower": "eager", "reread_inputs": reread}
        f = torch.compile(model, backend="remat", options=options)
        with pytest.raises(RereadError, match="Write to a clone of it") as error:
            gradients(model, f, by_detach)
        # Not what was said already.
        assert ("say reread_inputs=False" in str(error.value)) is reread


def test_a_plan_from_a_cache_is_watched_too() -> None:
    model = Language()
    for _ in range(2):
        torch.compiler.reset()
        f = torch.compile(model, backend="remat", options={"budget": 0.5})
        with pytest.raises(RereadError):
            gradients(model, f, by_detach)


def test_watching_keeps_no_output_alive() -> None:
    model = Language()
    f = torch.compile(model, backend="remat", options={"budget": 0.5, "lower": "eager"})
    loss, logits = f(torch.arange(72).view(8, 9) % 64)
    assert remat.plans()[-1].reread_outputs == (1,)
    storage = weakref.ref(logits.untyped_storage())
    tensor = weakref.ref(logits)
    loss.backward()  # backward lets go of what was saved
    gc.disable()
    try:
        del logits
        assert tensor() is None
        assert storage() is None
    finally:
        gc.enable()


def test_outputs_that_share_memory_share_that_of_copies() -> None:
    model = Views()
    joint = remat.capture(model, (torch.arange(72).view(8, 9) % 64,), lower="eager")
    plan = remat.plan(joint, 0, reread_inputs=False)
    plain = remat.plan(joint, 0)
    n = joint.num_fwd_outputs
    assert plain.reread_outputs
    assert plan.reread_outputs == ()
    for forward in (plan.forward, plain.forward):
        values = [v.meta["val"] for v in outputs_of(forward.graph)[1:n]]
        assert len({v.untyped_storage()._cdata for v in values}) == 1
    again = remat.plan(joint, plan=remat.Plan.from_json(plan.to_json()))
    assert again.reread_outputs == ()
    assert remat.Plan.from_json(plain.to_json()).reread_outputs == plain.reread_outputs


@pytest.mark.parametrize("first", [False, True])
def test_a_view_of_what_another_step_returned_hides_no_write(first: bool) -> None:
    """Such a view leads to the backward of the other step, which may not run before the output is read."""
    v, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def head(h: T) -> tuple[T, ...]:
        outputs = h.t(), (h @ w).sigmoid().view(2, 32)
        return outputs if first else outputs[::-1]

    options = {"budget": 1, "lower": "eager"}
    body, step = (
        torch.compile(f, backend="remat", options=options) for f in (lambda x: (x @ v).sin(), head)
    )
    y = step(body(torch.randn(4, 16)))[first]
    loss = y.sum()
    torch.autograd.grad(loss, w, retain_graph=True)
    y.detach().mul_(2)
    with pytest.raises(RereadError, match="was written to between forward and backward"):
        torch.autograd.grad(loss, w)
