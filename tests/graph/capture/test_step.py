"""Capture: what AOTAutograd would hand a partitioner, without a weight allocated."""

from __future__ import annotations

import inspect
import logging
import resource
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat.errors import CaptureError
from remat.graph.capture import step as capture
from remat.torch_compat import inductor_config
from tests.graphs import joint_of, weight

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Net(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.outer = nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.dropout(torch.relu(self.norm(self.inner(x))))
        return {"y": self.outer(h) * self.scale, "parts": [h, (h.sum(), 3)]}


def test_real_meta_and_fake_models_give_the_same_graph() -> None:
    real = remat.capture(Net(), (torch.randn(2, 8),))
    with torch.device("meta"):
        meta = remat.capture(Net(), (torch.randn(2, 8),))
    with FakeTensorMode():
        fake = remat.capture(Net(), (torch.randn(2, 8),))
    mixed = remat.capture(Net(), (torch.empty(2, 8, device="meta"),))
    assert real.fingerprint == meta.fingerprint == fake.fingerprint == mixed.fingerprint
    assert (real.lower, real.name, real.num_fwd_outputs) == ("inductor", "Net", 3)
    assert "native_dropout" not in str(real.graph), "Inductor decomposes it"


def test_the_model_is_left_as_it_was() -> None:
    model, x = Net(), torch.randn(2, 8, requires_grad=True)
    before = {k: (v, v.data_ptr(), v._version) for k, v in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    joint = remat.capture(model, (x,), lower="eager")
    assert (joint.lower, joint.name, joint.num_fwd_outputs) == ("eager", "Net", 3)
    assert "native_dropout" in str(joint.graph)
    after = model.state_dict(keep_vars=True)
    for name, (tensor, address, version) in before.items():
        assert after[name] is tensor
        assert (tensor.data_ptr(), tensor._version) == (address, version)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    model(x)["y"].sum().backward()


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()  # here
    return y.cos().sum()


def test_a_graph_break_names_its_line() -> None:
    lines, start = inspect.getsourcelines(breaks)
    line = start + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CaptureError, match=rf"one graph at {__file__}:{line}: ") as caught:
        remat.capture(breaks, (weight(3),), lower="eager")
    assert "fullgraph=False" in str(caught.value)
    assert ".." not in str(caught.value)


# Dynamo looks at .grad of what crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_graph_breaks_give_a_list_on_demand() -> None:
    joints = remat.capture(breaks, (weight(3),), fullgraph=False)
    assert [j.name for j in joints] == ["breaks[0]", "breaks[1]"]
    targets = [" ".join(str(n.target) for n in j.graph.nodes) for j in joints]
    assert "sin" in targets[0]
    assert "sum" in targets[1]
    for joint in joints:
        assert remat.plan(joint, 0).saved_bytes >= 0
    (whole,) = remat.capture(lambda x: x.sin().sum(), (weight(3),), fullgraph=False)
    assert whole.name == "<lambda>[0]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this build can fake CUDA")
def test_a_device_that_cannot_be_faked() -> None:
    with pytest.raises(CaptureError, match=r"'cuda' cannot be faked .* it can fake: (?!.*cuda)cpu"):
        remat.capture(Net(), (torch.randn(2, 8),), device="cuda")
    assert remat.capture(Net(), (torch.randn(2, 8),), device="cpu", lower="eager")


def under_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize(("lower", "fullgraph"), [("eager", True), ("inductor", False)])
def test_nothing_to_differentiate(lower: str, fullgraph: bool) -> None:
    def captured(model: Any, x: torch.Tensor) -> None:
        with pytest.raises(CaptureError, match="nothing to differentiate"):
            remat.capture(model, (x,), lower=lower, fullgraph=fullgraph)  # type: ignore[call-overload]

    captured(nn.Linear(8, 8).requires_grad_(False), torch.randn(2, 8))
    captured(under_no_grad, weight(3))
    with torch.no_grad():
        captured(nn.Linear(8, 8), torch.randn(2, 8))


def test_a_wrong_shape_names_the_users_line_and_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)  # here

    lines, start = inspect.getsourcelines(Layer)
    line = start + next(i for i, text in enumerate(lines) if "# here" in text)
    caplog.set_level(logging.ERROR)
    with pytest.raises(CaptureError, match=rf"'Layer' .* traced at {__file__}:{line}: ") as caught:
        remat.capture(Layer(), (torch.randn(3, 7),), lower="eager")
    assert caught.value.__cause__ is not None
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_class_is_refused_and_left_as_it_was() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    before = Plain.__call__
    with pytest.raises(CaptureError, match=r"'Plain' is a class; pass an instance: Plain\(\)"):
        remat.capture(Plain, (weight(3),))
    assert Plain.__call__ is before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"args": torch.randn(2, 8)}, "args is a Tensor; .* tuple .* write \\(x,\\), with a comma"),
        (
            {"args": {"x": torch.randn(2, 8)}},
            "args is a dict; .* write \\(\\), kwargs for keyword arg",
        ),
        ({"args": None}, "args is a NoneType; .* write \\(\\) for none"),
        (
            {"args": (torch.randn(2, 8),), "kwargs": torch.randn(2)},
            "kwargs is a Tensor; expected a dict",
        ),
        ({}, "'Net' cannot be called like that: it takes .* missing a required argument: 'x'"),
        ({"args": (torch.randn(2, 8), 1, 2, 3, 4)}, "too many positional arguments"),
        ({"lower": "sideways"}, "lower is 'sideways'"),
        ({"model": 3}, "model is a int"),
    ],
)
def test_a_call_that_cannot_be_meant_says_what_to_write(call: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        remat.capture(**{"model": Net(), **call})


def test_captures_do_not_disturb_what_is_compiled() -> None:
    model, x = Net().eval(), torch.randn(2, 8)
    seen = 0

    def count(module: Any, inputs: Any) -> Any:
        nonlocal seen
        seen += 1
        return module.forward

    compiled = torch.compile(model, backend=count)
    compiled(x)
    remat.capture(model, (x,), lower="eager")
    compiled(x)
    assert seen == 1


def test_many_captures_of_one_function_do_not_hit_a_limit() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        prints = {remat.capture(f, (weight(n),), lower="eager").fingerprint for n in range(2, 6)}
    assert len(prints) == 4


def test_layers_of_gigabytes_are_captured_without_weights() -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(2**14, 2**14), nn.GELU()) for _ in range(3)]
        model, x = nn.Sequential(*layers), torch.zeros(2048, 2**14)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 2**31
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    joint = remat.capture(model, (x,), lower="eager")
    plan = remat.plan(joint, 0.3, "greedy")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 500 * 1024
    assert plan.peak_bytes > 2**31
    assert 0 < plan.saved_bytes <= plan.capacity < plan.full_bytes


def test_a_copy_is_independent() -> None:
    joint = joint_of(lambda x: x.sin().exp().sum(), weight(3))
    copied = joint.copy()
    assert copied.fingerprint == joint.fingerprint
    assert [n.name for n in copied.graph.nodes] == [n.name for n in joint.graph.nodes]
    last = next(n for n in reversed(copied.graph.nodes) if n.op == "call_function")
    last.meta["recompute"] = "something"
    last.target = torch.ops.aten.cos.default
    assert copied.fingerprint != joint.fingerprint
    assert all("recompute" not in n.meta for n in joint.graph.nodes)


def overwrites_saved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = (x @ w).exp()
    y = h * 2
    h.add_(1)  # backward reads it
    return y.sum()


def written_leaf(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w[0].add_(1)
    return (x @ w).sum()


ALONE = r"PyTorch fails at this program without remat as well: .*backend='aot_eager'"


@pytest.mark.parametrize(
    ("f", "message", "lower"),
    [
        (
            overwrites_saved,
            "traced: RuntimeError: .* modified by an inplace operation",
            "inductor",
        ),
        (written_leaf, "a view of a leaf Variable that requires grad", "eager"),
    ],
)
def test_what_pytorch_cannot_run_says_so(f: Any, message: str, lower: str) -> None:
    with pytest.raises(CaptureError, match=f"{message}.*{ALONE}") as caught:
        remat.capture(f, (torch.randn(4, 4), weight(4, 4)), lower=lower)
    assert "_Backend" not in str(caught.value)


def test_what_fails_in_remat_alone_does_not_blame_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> Any:
        raise IndexError("nobody thought of this")

    monkeypatch.setattr(capture, "is_region", crash)
    with pytest.raises(CaptureError, match=r"IndexError: nobody thought of this$"):
        remat.capture(Net(), (torch.randn(2, 8),), lower="eager")


class Locking(nn.Module):
    """Sets itself up under a lock when it is first called, as models of `transformers` do."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.is_set_up = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set_up:
            with self.lock:
                self.inner.register_forward_hook(lambda _, __, out: out["y"] * 3)
                self.is_set_up = True
        return self.inner(x).sum()  # type: ignore[no-any-return]


def test_a_model_that_takes_a_lock_once_is_captured_as_later_calls_run() -> None:
    model = Locking()
    first = remat.capture(model, (torch.randn(2, 8),), lower="eager")
    assert not model.is_set_up  # the model is left as it was
    assert not model.inner._forward_hooks
    model(torch.randn(2, 8))
    again = remat.capture(model, (torch.randn(2, 8),), lower="eager")
    assert again.fingerprint == first.fingerprint


def test_a_lock_that_is_taken_at_every_call_is_told() -> None:
    lock = threading.Lock()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with lock:
            return x @ w

    with pytest.raises(CaptureError, match=r"as one graph.*enter a `lock` context manager"):
        remat.capture(f, (torch.randn(2, 8), weight(8, 8)))
    assert not lock.locked()


def unread_dropout(x: torch.Tensor) -> torch.Tensor:
    torch.nn.functional.dropout(x, 0.4)
    return x.sin()


def written_input(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).sin()


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize(("f", "traced"), [(unread_dropout, "dropout"), (written_input, "mul")])
def test_effects_that_nobody_reads_are_captured(f: Any, traced: str, run: bool) -> None:
    """With ``fallback_random`` a dropout draws although nobody reads it, as in eager PyTorch."""
    x = torch.ones(4, requires_grad=True) * 3  # no leaf, so it may be written to
    with inductor_config.patch(fallback_random=True):
        (joint,) = remat.capture(f, (x,), lower="eager", fullgraph=False, run=run)
    assert traced in str(joint.graph)
    assert torch.equal(x, torch.full((4,), 3.0))
