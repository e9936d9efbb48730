"""The pass `chunk-loss`: results and sizes of split losses, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import remat
from remat.errors import PlanError, ProblemError
from remat.graph.joint import outputs_of
from remat.graph.memory.storages import leaves_of
from remat.passes.core.state import State
from remat.passes.joint.chunk_loss import ChunkLoss
from remat.passes.joint.dce import DeadCode
from remat.planning.pipelines import initial_state

# Dynamo creates an instance of each custom function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

V, H, BATCH, SEQUENCE = 120, 8, 2, 15  # 30 tokens: of 4 chunks, the last is shorter


class Toy(nn.Module):
    """A language model of one layer with a loss."""

    def __init__(self, loss: Callable[..., Any], *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V, H), nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = self.embedding(x)
        return self.loss(self.head, hidden + torch.tanh(self.layer(hidden)), y)


def entropy(logits: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, V), y.view(-1), **options)


def mean(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(head(h), y)


def z_loss(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = head(h)
    return entropy(logits, y) + 1e-3 * logits.logsumexp(-1).square().mean()


def shifted(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As the causal language models of transformers: in float32, with the labels moved by one."""
    labels = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return entropy(head(h).float(), labels, ignore_index=-100)


def weighted(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(head(h), y, weight=torch.linspace(0.5, 1.5, V, dtype=h.dtype))


def distilled(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The logits of a second model are read by the chunks of the first's."""
    teacher = F.log_softmax(head((2 * h).detach()).detach(), -1)
    return F.kl_div(F.log_softmax(head(h), -1), teacher, log_target=True, reduction="sum")


def accuracy(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> Any:
    logits = head(h)
    return entropy(logits, y), (logits.argmax(-1) == y).float().mean()


class Clipped(torch.autograd.Function):
    """Passes a value on, and limits its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Scaled(torch.autograd.Function):
    """The gradient is multiplied by the sum of the logits, which forward does not need."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.sum())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (total,) = ctx.saved_tensors
        return gradient * total


def scaled(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(Scaled.apply(head(h)), y)


def by_position(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The bias is large, and all rows of the batch share it."""
    return entropy(head(h) + torch.arange(SEQUENCE * V).view(SEQUENCE, V).sin(), y)


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, bool]]] = {
    "mean": (mean, {}),
    "each token": (lambda head, h, y: entropy(head(h), y, reduction="none"), {}),
    "tied embeddings": (mean, {"tied": True}),
    "label smoothing": (lambda head, h, y: entropy(head(h), y, label_smoothing=0.1), {}),
    "z-loss": (z_loss, {}),
    "soft cap": (lambda head, h, y: entropy(30 * torch.tanh(head(h) / 30), y), {}),
    "shifted labels": (shifted, {"bias": True}),
    "class weights": (weighted, {}),
    "two heads": (lambda head, h, y: entropy(head(h), y) + entropy(head(2 * h), y), {}),
    "distilled": (distilled, {}),
    "accuracy": (accuracy, {}),
    "square of the sum": (
        lambda head, h, y: entropy(head(h), y, reduction="sum").square(),
        {},
    ),
    "clipped": (lambda head, h, y: entropy(Clipped.apply(head(h)), y), {}),
    "scaled": (scaled, {}),
    "by position": (by_position, {}),
}
#: Backward computes the gradients of these losses, whatever `in_forward` is. The reasons are: a tangent for each token;
#: a gradient that needs the loss of all chunks; a gradient that is not linear in the tangent; and a gradient that
#: needs the logits of all chunks.
IN_BACKWARD = ("each token", "square of the sum", "clipped", "scaled")


@functools.cache
def captured(
    name: str, lower: str = "eager", dtype: torch.dtype = torch.float32
) -> remat.JointGraph:
    loss, options = LOSSES[name]
    return capture(loss, lower, dtype, **options)


def capture(
    loss: Callable[..., Any],
    lower: str = "eager",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> remat.JointGraph:
    torch.manual_seed(0)
    x = torch.randint(0, V, (BATCH, SEQUENCE))
    return remat.capture(Toy(loss, **options).to(dtype), (x, x.clone()), lower=lower)


def split(joint: remat.JointGraph, **options: Any) -> State:
    state = DeadCode().run(initial_state(joint, in_place=False, count_outputs=False)).state
    return ChunkLoss(**options).run(state).state


def results(module: fx.GraphModule) -> list[torch.Tensor]:
    """Run a joint graph on random parameters, labels of which some are ignored, and a tangent other than 1."""
    torch.manual_seed(1)
    given = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if value.dtype is torch.int64:
            ids = torch.randint(0, V, value.shape)
            # The second input holds the labels.
            ids[0, :4] = -100 if any(v.dtype is torch.int64 for v in given) else 1
            given.append(ids)
        else:
            given.append(torch.rand(value.shape).sub(0.3).to(value.dtype))
    with torch.no_grad():
        found = fx.Interpreter(module).run(*given)
    return [t for t in leaves_of(found) if isinstance(t, torch.Tensor)]


def largest(joint: remat.JointGraph) -> int:
    """Return the elements of the largest value that is computed and not a view of a smaller one."""
    calls = [n.meta.get("val") for n in joint.graph.nodes if n.op == "call_function"]
    tensors = [v for v in calls if isinstance(v, torch.Tensor)]
    return max(v.untyped_storage().nbytes() // v.element_size() for v in tensors)


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], within: float) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        scale = b.double().abs().max().clamp_min(1e-30)
        assert float((a.double() - b.double()).abs().max() / scale) <= within


def assert_split(joint: remat.JointGraph, **options: Any) -> State:
    state = split(joint, **options)
    assert_close(results(state.joint.graph_module), results(joint.graph_module), 1e-5)
    return state


def late_products(state: State) -> int:
    """Return the number of products that depend on a tangent and give a value with a vocabulary."""
    late: set[fx.Node] = set()
    for n in state.joint.graph.nodes:
        if "tangents" in n.name or any(x in late for x in n.all_input_nodes):
            late.add(n)
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return sum(n.target in products and V in n.meta["val"].shape for n in late)


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        *[(name, "eager") for name in LOSSES if name not in ("mean", "accuracy", "class weights")],
        # These have every operator that Inductor's decompositions make of the losses above.
        *[(name, "inductor") for name in ("shifted labels", "class weights", "accuracy")],
    ],
)
def test_losses_and_gradients_are_those_of_the_step(name: str, lower: str) -> None:
    joint = captured(name, lower)
    assert largest(joint) == 30 * V
    heads = 2 if name == "two heads" else 1
    for in_forward in (True, False):
        state = assert_split(joint, chunks=4, in_forward=in_forward)
        # All chunks read a bias that differs by position, so the bias stays whole.
        assert largest(state.joint) <= (30 * V if name == "by position" else 8 * V + V * H)
        late = name in IN_BACKWARD or not in_forward
        # Whether forward computes the gradients with label smoothing is a matter of cost alone.
        assert late_products(state) == (4 * heads if late else 0) or name == "label smoothing"


@pytest.mark.parametrize("chunks", [29, 1000])
def test_any_number_of_chunks(chunks: int) -> None:
    state = assert_split(captured("shifted labels"), chunks=chunks)
    assert largest(state.joint) == max(-(-30 // chunks) * V, V * H)


def test_bfloat16_sums_in_float32() -> None:
    """A split step in 16 bits is as near to the step in 32 bits as the whole one."""
    exact = [t.double() for t in results(captured("shifted labels").graph_module)]
    joint = captured("shifted labels", dtype=torch.bfloat16)

    def distances(module: fx.GraphModule) -> list[float]:
        pairs = zip(results(module), exact, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    whole = distances(joint.graph_module)
    # The product of each chunk is rounded once.
    parts = distances(split(joint, chunks=30).joint.graph_module)
    assert max(a / b for a, b in zip(parts, whole, strict=True)) <= 1.5


def test_gradients_in_float16_are_computed_in_backward() -> None:
    """The loss may be scaled, and a tangent of 1 lacks that scale."""
    joint = capture(mean, dtype=torch.float16)
    assert late_products(split(joint, chunks=4)) == 4


def test_the_gradient_of_a_scalar_keeps_its_type() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy((x @ w * scale).float(), y)

    w, scale = (torch.rand(s, dtype=torch.bfloat16, requires_grad=True) for s in ((H, V), ()))
    x = torch.rand(12, H, dtype=torch.bfloat16)
    joint = remat.capture(loss, (x, w, scale, torch.arange(12)), lower="eager")
    state = split(joint, chunks=4)
    types = [[n.meta["val"].dtype for n in outputs_of(j.graph) if n] for j in (joint, state.joint)]
    assert types[0] == types[1]


class Turned(torch.autograd.Function):
    """A linear layer whose backward reads the gradient of its input along rows and columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        of_input = gradient @ weight
        return gradient @ of_input, of_input


def square(logits: Callable[..., Any], dynamic: bool = False) -> remat.JointGraph:
    """Capture a cross-entropy loss of 12 tokens, 12 features and a vocabulary of 12."""
    x, w, y = torch.rand(12, 12), torch.rand(12, 12, requires_grad=True), torch.arange(12)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
    loss = lambda x, w, y: F.cross_entropy(logits(x, w), y)  # noqa: E731
    return remat.capture(loss, (x, w, y), lower="eager")


def test_a_pass_with_one_chunk_changes_nothing() -> None:
    joint = captured("mean")
    assert split(joint, chunks=1).joint.fingerprint == joint.fingerprint
    with pytest.raises(ProblemError, match="chunks is 0"):
        ChunkLoss(chunks=0)


def returned(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> Any:
    logits = head(h)
    return entropy(logits, y), logits


def shortened(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(head(h)[:, :-1].contiguous(), y[:, 1:].contiguous())


def dropped(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(F.dropout(head(h), 0.5), y)


def largest_logit(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = head(h)
    return entropy(logits - logits.max(), y)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: capture(returned), "are an output of the step; return only the loss"),
        (lambda: capture(shortened, "inductor"), r"\(aten.slice.Tensor\) reads all of"),
        (lambda: capture(largest_logit, "inductor"), "reads all of"),
        (lambda: capture(dropped), r"\(aten.native_dropout.default\) reads all of"),
        (lambda: capture(weighted), "'nll_loss_forward' has class weights"),
        (
            lambda: square(lambda x, w: Turned.apply(torch.tanh(x @ w), w)),
            r"'mm_\d' \(aten.mm.default\) reads all",
        ),
        (
            lambda: square(lambda x, w: (h := torch.tanh(x @ w)) @ h),
            "'mm_1' is the product of a matrix and itself",
        ),
        # Values before the logits are then as large as the logits, so the named call may not read logits.
        (
            lambda: square(lambda x, w: (h := x @ w) - h.max()),
            "with a vocabulary of 12 and 12 features before it",
        ),
        (lambda: square(lambda x, w: x * w), "no final linear layer"),
        (
            lambda: square(lambda x, w: x @ w, dynamic=True),
            "is symbolic; expected a fixed number of tokens",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    make: Callable[[], remat.JointGraph], reason: str
) -> None:
    with pytest.raises(PlanError, match=f"the loss cannot be split into chunks: .*{reason}"):
        split(make(), chunks=4)


def test_large_values_before_the_logits_do_not_matter() -> None:
    split(square(lambda x, w: (x + x.max() * w.sum()) @ w), chunks=4)


def test_effects_keep_their_order() -> None:
    """Random operators on both sides of the loss stay in order."""

    def noisy(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = entropy(head(F.dropout(h, 0.5)), y)
        return loss + F.dropout(loss.expand(4), 0.5).sum()

    joint = capture(noisy)
    state = assert_split(joint, chunks=4)

    def draws(graph: fx.Graph) -> list[str]:
        return [n.name for n in graph.nodes if n.target is torch.ops.aten.native_dropout.default]

    assert draws(state.joint.graph) == draws(joint.graph)


def test_a_plan_splits_by_the_pass_in_a_pipeline() -> None:
    joint = captured("mean")
    text = "dce,cse,chunk-loss(chunks=4,in-forward=false),dce,cse,min-cut,knapsack(solver=greedy,budget=0.5),partition"
    plan = remat.plan(joint, pipeline=text)
    assert plan.chunk == "chunk-loss(chunks=4,in-forward=false)"
    with pytest.raises(ProblemError, match="chunk given beside a pipeline"):
        remat.plan(joint, pipeline=text, chunk=4)
