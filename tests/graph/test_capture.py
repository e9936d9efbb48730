"""Capture: what AOTAutograd would hand a partitioner, without a weight allocated."""

from __future__ import annotations

import inspect
import logging
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat.errors import CaptureError
from remat.graph import capture
from remat.torch_compat import inductor_config
from tests.graphs import joint_of, weight
from tests.models import build

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Net(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.5)
        self.outer = nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.dropout(torch.relu(self.inner(x)))
        return {"y": self.outer(h) * self.scale, "parts": [h, (h.sum(), 3)]}


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_real_meta_and_fake_models_give_the_same_graph(lower: str) -> None:
    real = remat.capture(Net(), (torch.randn(2, 8),), lower=lower)
    with torch.device("meta"):
        meta = remat.capture(Net(), (torch.randn(2, 8),), lower=lower)
    with FakeTensorMode():
        fake = remat.capture(Net(), (torch.randn(2, 8),), lower=lower)
    mixed = remat.capture(Net(), (torch.empty(2, 8, device="meta"),), lower=lower)
    assert real.fingerprint == meta.fingerprint == fake.fingerprint == mixed.fingerprint
    assert (real.lower, real.name, real.num_fwd_outputs) == (lower, "Net", 3)


def test_fingerprints_tell_graphs_apart() -> None:
    def prints(model: nn.Module, *shape: int) -> str:
        return remat.capture(model, (torch.randn(*shape),), lower="eager").fingerprint

    base = prints(Net(), 2, 8)
    assert prints(Net(), 2, 8) == base
    assert prints(Net(), 3, 8) != base
    assert prints(Net().eval(), 2, 8) != base
    assert remat.capture(Net(), (torch.randn(2, 8),)).fingerprint != base


def test_the_model_is_left_as_it_was() -> None:
    model, x = Net(), torch.randn(2, 8, requires_grad=True)
    before = {k: (v, v.data_ptr(), v._version) for k, v in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    remat.capture(model, (x,), lower="eager")
    after = model.state_dict(keep_vars=True)
    for name, (tensor, address, version) in before.items():
        assert after[name] is tensor
        assert (tensor.data_ptr(), tensor._version) == (address, version)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    model(x)["y"].sum().backward()


def test_what_is_traced_for_eager_is_not_decomposed() -> None:
    def targets(lower: str) -> set[str]:
        joint = remat.capture(Net(), (torch.randn(2, 8),), lower=lower)
        return {str(n.target) for n in joint.graph.nodes if n.op == "call_function"}

    assert "aten.native_dropout.default" in targets("eager")
    assert "aten.native_dropout.default" not in targets("inductor")


@pytest.mark.parametrize("name", ["resnet", "randn_like", "mutated_buffer"])
def test_models_on_meta_are_captured_as_real_ones(name: str) -> None:
    step = build(name)
    joint = remat.capture(step.model, step.args, step.kwargs, lower="eager")
    with torch.device("meta"):
        meta = build(name)
    assert all(p.is_meta for p in meta.model.parameters())
    again = remat.capture(meta.model, meta.args, meta.kwargs, lower="eager")
    assert again.fingerprint == joint.fingerprint


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
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_graph_breaks_give_a_list_on_demand(lower: str) -> None:
    joints = remat.capture(breaks, (weight(3),), lower=lower, fullgraph=False)
    assert [j.name for j in joints] == ["breaks[0]", "breaks[1]"]
    targets = [" ".join(str(n.target) for n in j.graph.nodes) for j in joints]
    assert "sin" in targets[0]
    assert "sum" in targets[1]
    for joint in joints:
        assert remat.plan(joint, 0).saved_bytes >= 0
    (whole,) = remat.capture(lambda x: x.sin().sum(), (weight(3),), lower=lower, fullgraph=False)
    assert whole.name == "<lambda>[0]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this build can fake CUDA")
def test_a_device_that_cannot_be_faked() -> None:
    with pytest.raises(CaptureError, match=r"'cuda' cannot be faked .* it can fake: (?!.*cuda)cpu"):
        remat.capture(Net(), (torch.randn(2, 8),), device="cuda")
    assert remat.capture(Net(), (torch.randn(2, 8),), device="cpu", lower="eager")


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def under_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_nothing_to_differentiate(lower: str, fullgraph: bool) -> None:
    for model, x in ((frozen(), torch.randn(2, 8)), (under_no_grad, weight(3))):
        with pytest.raises(CaptureError, match="nothing to differentiate"):
            remat.capture(model, (x,), lower=lower, fullgraph=fullgraph)  # type: ignore[call-overload]
    with torch.no_grad(), pytest.raises(CaptureError, match="nothing to differentiate"):
        remat.capture(Net(), (torch.randn(2, 8),), lower=lower)


def test_errors_in_the_model_are_told() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(7, 7)

    with pytest.raises(CaptureError, match=r"'wrong' .* at .*test_capture.py:\d+") as caught:
        remat.capture(wrong, (weight(3, 3),), lower="eager")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net(), {"lower": "sideways"}, "lower is 'sideways'"),
        (3, {}, "model is a int"),
    ],
)
def test_arguments_that_cannot_be_meant(model: Any, options: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        remat.capture(model, (torch.randn(2, 8),), **options)


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
    with pytest.raises(CaptureError, match=rf"failed while it was traced at {__file__}:{line}: "):
        remat.capture(Layer(), (torch.randn(3, 7),), lower="eager")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_class_is_refused_and_left_as_it_was() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    before = Plain.__call__
    with pytest.raises(CaptureError, match=r"'Plain' is a class; pass an instance: Plain\(\)"):
        remat.capture(Plain, (weight(3),))
    assert Plain.__call__ is before
    assert not [name for name in vars(Plain) if "compile" in name or name == "__call__"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((torch.randn(2, 8),), "args is a Tensor; .* tuple .* write \\(x,\\), with a comma"),
        (({"x": torch.randn(2, 8)},), "args is a dict; .* write \\(\\), kwargs for keyword arg"),
        ((None,), "args is a NoneType; .* write \\(\\) for none"),
        (((torch.randn(2, 8),), torch.randn(2)), "kwargs is a Tensor; expected a dict"),
        ((), "'Net' cannot be called like that: it takes .* missing a required argument: 'x'"),
        (((torch.randn(2, 8), 1, 2, 3, 4),), "too many positional arguments"),
    ],
)
def test_a_call_that_cannot_be_meant_says_what_to_write(call: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        remat.capture(Net(), *call)


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
    prints = {
        remat.capture(f, (weight(n),), lower="eager").fingerprint
        for n in range(2, 5 + torch._dynamo.config.recompile_limit)
    }
    assert len(prints) == 3 + torch._dynamo.config.recompile_limit


def test_seven_billion_shaped_layers_are_captured_without_weights() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=2,
        num_attention_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        ids = torch.zeros(1, 2048, dtype=torch.long)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 2**31
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    joint = remat.capture(model, (), {"input_ids": ids, "labels": ids}, lower="eager")
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


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("f", "message"),
    [
        (overwrites_saved, "traced: RuntimeError: .* modified by an inplace operation"),
        (written_leaf, "a view of a leaf Variable that requires grad"),
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


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_model_that_takes_a_lock_once_is_captured_as_later_calls_run(lower: str) -> None:
    model = Locking()
    first = remat.capture(model, (torch.randn(2, 8),), lower=lower)
    assert not model.is_set_up  # the model is left as it was
    assert not model.inner._forward_hooks
    model(torch.randn(2, 8))
    assert remat.capture(model, (torch.randn(2, 8),), lower=lower).fingerprint == first.fingerprint


def test_a_lock_that_is_taken_at_every_call_is_told() -> None:
    lock = threading.Lock()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with lock:
            return x @ w

    with pytest.raises(CaptureError, match=r"as one graph.*enter a `lock` context manager"):
        remat.capture(f, (torch.randn(2, 8), weight(8, 8)))
    assert not lock.locked()


def recording_models() -> list[tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]]:
    """Models that take a lock to set up the recording of hidden states, with what they are called with."""
    from transformers import (
        SegformerConfig,
        SegformerForSemanticSegmentation,
        Wav2Vec2Config,
        Wav2Vec2ForSequenceClassification,
    )

    segmenting = SegformerForSemanticSegmentation(
        SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=4,
        )
    )
    hearing = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=[16, 16],
            conv_stride=[5, 2],
            conv_kernel=[10, 3],
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
            layerdrop=0.0,
            mask_time_prob=0.0,
            classifier_proj_size=8,
            use_weighted_layer_sum=True,
        )
    )
    hearing.freeze_feature_encoder()  # or it has an input require a gradient, which breaks the graph
    return [
        (
            segmenting.train(),
            lambda batch: {
                "pixel_values": torch.zeros(batch, 3, 32, 32),
                "labels": torch.zeros(batch, 32, 32, dtype=torch.long),
            },
        ),
        (
            hearing.train(),
            lambda batch: {
                "input_values": torch.zeros(batch, 400),
                "labels": torch.zeros(batch, dtype=torch.long),
            },
        ),
    ]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("which", [0, 1], ids=["segformer", "wav2vec2"])
def test_models_that_record_hidden_states_are_captured_and_fitted(which: int) -> None:
    model, inputs = recording_models()[which]
    fitted = remat.fit(model, inputs, memory="1GiB", batches=[2], lower="eager")
    assert fitted.largest_batch == 2


@pytest.mark.parametrize("run", [False, True])
def test_a_dropout_that_nobody_reads_is_captured(run: bool) -> None:
    """With ``fallback_random`` it draws although nobody reads it, as in eager PyTorch."""

    def f(x: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.dropout(x, 0.4)
        return x.sin()

    args = (torch.ones(4, requires_grad=True),)
    with inductor_config.patch(fallback_random=True):
        (joint,) = remat.capture(f, args, lower="eager", fullgraph=False, run=run)
    assert "dropout" in str(joint.graph)


@pytest.mark.parametrize("run", [False, True])
def test_an_input_that_is_no_leaf_may_be_written_to(run: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    x = torch.ones(4, requires_grad=True) * 3
    (joint,) = remat.capture(f, (x,), lower="eager", fullgraph=False, run=run)
    assert "mul" in str(joint.graph)
    assert torch.equal(x, torch.full((4,), 3.0))
