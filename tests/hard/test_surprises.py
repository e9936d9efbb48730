"""What PyTorch does against a good guess, and what remat does there; `docs/surprises.md` names these tests.

A test whose first half fails says that another PyTorch behaves otherwise: correct its row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._functorch import config as functorch_config
from torch._functorch._activation_checkpointing.knapsack import (
    dp_knapsack,
    dp_knapsack_sliding_hirschberg,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import remat
from remat import torch_compat
from tests.graphs import joint_of, weight
from tests.hard.steps import compiled, pair

T = torch.Tensor
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
pytestmark = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="the rows are about PyTorch 2.13 and later"
)


def by_pytorch(f: Callable[..., Any], budget: float, products: list[int] | None = None) -> Any:
    """The program on plans of PyTorch's partitioner; counts the matrix products of each backward graph."""

    def backward(graph: Any, _: Any) -> Any:
        if products is not None:
            products.append(sum(n.target in PRODUCTS for n in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )

    def run(*args: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            return torch.compile(f, backend=backend)(*args)

    return run


def gradient(f: Callable[..., Any], run: Callable[..., Any] | None = None) -> T:
    """The gradient of the first argument, from the same numbers and the same random state."""
    torch._dynamo.reset()
    args = pair()
    torch.manual_seed(3)
    (run or f)(*args).sum().backward()
    assert args[0].grad is not None
    return args[0].grad


def far(a: T, b: T) -> bool:
    return float(a.dist(b)) > 1e-3 * float(b.norm())


class Gated(nn.Module):
    """A gate computed from a buffer, which the step then updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: T) -> T:
        h = torch.tanh(self.linear(x)) * torch.sigmoid(self.mean)
        with torch.no_grad():
            self.mean.lerp_(h.abs().mean(0), 0.5)
        return h


def test_a_gate_of_a_buffer_that_is_updated_afterwards() -> None:
    """Without any budget, backward recomputes the gate from the buffer that is overwritten by then."""
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(8, 16)

    def stepped(**how: Any) -> tuple[T, T]:
        own = copy.deepcopy(model)
        torch._dynamo.reset()
        out = (torch.compile(own, **how) if how else own)(x)
        out.square().sum().backward()
        assert own.linear.weight.grad is not None
        return out.detach(), own.linear.weight.grad

    out, expected = stepped()
    wrong_out, wrong = stepped(backend="aot_eager")
    torch.testing.assert_close(wrong_out, out)
    assert far(wrong, expected)
    for budget in (0, 1):
        found = stepped(backend="remat", options={"budget": budget, "lower": "eager"})[1]
        torch.testing.assert_close(found, expected)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def test_must_save_at_budget_0() -> None:
    """PyTorch returns the inputs of the graph as the values to save, without a look at tags."""
    contexts = partial(create_selective_checkpoint_contexts, keep_products)

    def f(x: T, w: T) -> T:
        def two(y: T) -> T:
            return ((y @ w).sin() @ w).sin()

        return checkpoint(two, x, use_reentrant=False, context_fn=contexts).sum()  # type: ignore[no-any-return]

    products: list[int] = []
    for budget in (1, 0):
        gradient(f, by_pytorch(f, budget, products))
    assert products == [4, 6]
    joint = joint_of(f, weight(8, 8), weight(8, 8))
    for budget in (1, 0):
        assert {"mm", "mm_1"} <= set(remat.plan(joint, budget).saved)


def saved_bytes(model: nn.Module, x: T, budget: float, cast: bool, **how: Any) -> int:
    """Bytes of the memory that forward saves, without that of parameters and of the input."""
    torch._dynamo.reset()
    with (
        functorch_config.patch(activation_memory_budget=budget, enable_autograd_cache=False),
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
    ):
        node = torch.compile(model, **how)(x).grad_fn
    held = {value.untyped_storage().data_ptr() for value in (x, *model.parameters())}
    memory = (value.untyped_storage() for value in node.saved_tensors)
    return sum({s.data_ptr(): s.nbytes() for s in memory if s.data_ptr() not in held}.values())


class Repeated(nn.Module):
    """Four blocks, perhaps each a region to compile once."""

    def __init__(self, marked: bool = False) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) for _ in range(8))
        block = lambda x, a, b: x + torch.tanh(x @ a) @ b  # noqa: E731
        self.block = torch.compiler.nested_compile_region(block) if marked else block

    def forward(self, x: T) -> T:
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = self.block(x, up, down)
        return x.sin()


THEIRS = {"backend": "aot_eager_decomp_partition"}


def test_regions_count_as_free() -> None:
    """PyTorch's partitioner runs a region again for any budget below 1, as it does a sum."""
    model, x = Repeated(marked=True), weight(64, 32)

    def theirs(budget: float) -> int:
        return saved_bytes(model, x, budget, False, **THEIRS)

    most = theirs(1)
    assert most > 0 == theirs(0.99) == theirs(0)
    ours = {"backend": "remat", "options": {"budget": 0.9, "lower": "eager"}}
    assert most / 2 < saved_bytes(model, x, 1, False, **ours) < most


@pytest.mark.parametrize(("words", "cast"), [(8, False), (8, True), (8192, False)])
def test_budgets_beside_large_parameters(words: int, cast: bool) -> None:
    """PyTorch takes all parameters for bytes that every plan saves, and reads no budget below them."""
    model, x = nn.Sequential(nn.Embedding(words, 32), Repeated()), torch.arange(8)
    most, half = (saved_bytes(model, x, budget, cast, **THEIRS) for budget in (1, 0.5))
    assert (half == most) is (cast or words > 8)
    ours = {"backend": "remat", "options": {"budget": 0.5, "lower": "eager"}}
    assert saved_bytes(model, x, 1, cast, **ours) <= most / 2


def test_budgets_of_tensor_parallel_models(group: None) -> None:
    """PyTorch adds up the bytes of all inputs, and the mesh of a DTensor is an input without any."""
    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(8, 16)

    def stepped(**how: Any) -> T:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=0.5, enable_autograd_cache=False):
            torch.compile(model, **how)(x).sum().backward()
        return model[0].weight.grad.full_tensor()  # type: ignore[union-attr, operator]

    with pytest.raises(BackendCompilerFailed, match="Cannot compute the size of"):
        stepped(**THEIRS)
    ours = {"backend": "remat", "options": {"budget": 0.5, "lower": "eager"}}
    torch.testing.assert_close(stepped(**ours), stepped(backend="eager"))


def test_ratio_0_is_not_the_least_peak() -> None:
    """Backward holds all recomputed values before the first gradient is done."""
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    joint = remat.capture(nn.Sequential(*layers), (torch.randn(128, 16),), lower="eager")
    plans = [remat.plan(joint, budget) for budget in (0, 0.5, 1)]
    peaks = [plan.peak_bytes for plan in plans]
    assert plans[0].saved_bytes < plans[1].saved_bytes < plans[2].saved_bytes
    assert peaks[1] < peaks[0] == peaks[2]
    assert remat.plan(joint, remat.Peak(0.0)).peak_bytes <= peaks[1]


RANDOM: dict[str, Callable[[T], T]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "randn_like": lambda h: h * torch.randn_like(h),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_below_budget_1(name: str) -> None:
    """PyTorch's backward draws new numbers if a plan recomputes the operator."""

    def f(x: T, w: T) -> T:
        return RANDOM[name]((x @ w).sin()).exp().sin() @ w

    expected = gradient(f)
    assert far(gradient(f, by_pytorch(f, 0)), expected)
    torch.testing.assert_close(gradient(f, compiled(f, budget=0)), expected)


def blocks(marked: bool, checkpointed: bool) -> Callable[[T, T], T]:
    """Two equal blocks with dropout, perhaps marked as a region to compile once."""

    def block(h: T, w: T) -> T:
        return F.dropout((h @ w).sin(), 0.5)

    part = torch.compiler.nested_compile_region(block) if marked else block

    def f(x: T, w: T) -> T:
        for _ in range(2):
            x = checkpoint(part, x, w, use_reentrant=False) if checkpointed else part(x, w)
        return x

    return f


def test_checkpointed_regions_draw_other_dropout() -> None:
    """A region is one operator to PyTorch's partitioner, which does not see that the region draws."""
    expected = gradient(blocks(marked=False, checkpointed=False))
    for marked in (False, True):
        f = blocks(marked, checkpointed=True)
        assert far(gradient(f, torch.compile(f, backend="aot_eager")), expected) is marked
        torch.testing.assert_close(gradient(f, compiled(f, budget=1)), expected)


def test_save_on_cpu_hides_writes_on_a_cpu() -> None:
    """The hook keeps the tensor itself, and autograd checks no version, unless the step is compiled."""

    def f(x: T, w: T) -> T:
        h = (x @ w).exp()
        y = h.sin()
        h.mul_(2)
        return y

    def saved_on_cpu(run: Callable[..., Any]) -> T:
        def under(*args: Any) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return run(*args)

        return gradient(f, under)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(f)
    expected = gradient(lambda x, w: (x @ w).exp().sin())
    assert far(saved_on_cpu(f), expected)
    with pytest.raises(BackendCompilerFailed, match="modified by an inplace operation"):
        saved_on_cpu(compiled(f, budget=0.5))


def test_dropout_in_a_branch_is_drawn_twice() -> None:
    """The backward of `torch.cond` runs the branch again, with other numbers: with remat too."""

    def drop(h: T) -> T:
        return F.dropout(h.exp(), 0.5)

    def whole(x: T, w: T) -> T:
        return drop(x @ w)

    def branch(x: T, w: T) -> T:
        return torch.cond((x @ w).isfinite().all(), drop, torch.sin, (x @ w,))

    expected = gradient(whole)
    torch.testing.assert_close(gradient(whole, compiled(whole, budget=0)), expected)
    assert far(gradient(branch), expected)
    for budget in (0, 1):
        with pytest.warns(UserWarning, match="draws other random numbers than forward did"):
            wrong = gradient(branch, compiled(branch, budget=budget))
        assert far(wrong, expected)


@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {"backend": "remat"}])
def test_a_compiled_checkpoint_refuses_a_branch(how: dict[str, str]) -> None:
    """PyTorch refuses the checkpoint before a backend gets the graph; a budget recomputes the branch."""

    def branch(h: T, w: T) -> T:
        product = (h @ w).sin()
        return torch.cond(product.sum() > 0, torch.sin, torch.cos, (product,)) @ w

    def f(x: T, w: T) -> T:
        return checkpoint(branch, x, w, use_reentrant=False).sin()  # type: ignore[no-any-return]

    with pytest.raises(
        BackendCompilerFailed, match="no rule registered for HigherOrderOperator cond"
    ):
        gradient(f, torch.compile(f, **how))
    without = lambda x, w: branch(x, w).sin()  # noqa: E731
    torch.testing.assert_close(gradient(without, compiled(without, budget=0)), gradient(f))


def save_rand_like(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is aten.rand_like.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_saved_random_operator_moves_the_numbers_of_the_next() -> None:
    """The saved operator draws nothing in recomputation, so a later operator draws other numbers."""

    def body(x: T, w: T) -> T:
        h = (x @ w * torch.rand_like(x)).sin()
        return (h * torch.randn_like(h)).exp()

    def under(contexts: Any) -> Callable[..., T]:
        return lambda x, w: checkpoint(body, x, w, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    expected = gradient(body)
    theirs = partial(create_selective_checkpoint_contexts, save_rand_like)
    assert far(gradient(under(theirs)), expected)
    torch.testing.assert_close(gradient(under(remat.sac.context_fn(save_rand_like))), expected)


def test_backend_eager_loses_the_random_state_of_checkpoints() -> None:
    def f(x: T, w: T) -> T:
        inner = lambda y: F.dropout((y @ w).sin(), 0.5).exp()  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False).sum()  # type: ignore[no-any-return]

    expected = gradient(f)
    assert far(gradient(f, torch.compile(f, backend="eager")), expected)
    torch.testing.assert_close(gradient(f, torch.compile(f, backend="aot_eager")), expected)
    torch.testing.assert_close(gradient(f, compiled(f, budget=1)), expected)


def test_backend_eager_refuses_a_checkpointed_batch_norm() -> None:
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()

    def f(x: T, w: T) -> T:
        return checkpoint(norm, x @ w, use_reentrant=False).sin()  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(f, torch.compile(f, backend="eager"))
    torch.testing.assert_close(gradient(f, compiled(f, budget=1)), gradient(f))


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: T) -> tuple[T, T]:
        return self.used(x), self.unused(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "remat"])
def test_a_branch_that_the_loss_does_not_see(backend: str) -> None:
    """Under AOTAutograd its parameters get zeros instead of None, so weight decay moves them."""
    model = TwoBranches()
    options = {"options": {"lower": "eager"}} if backend == "remat" else {}
    before = model.unused.weight.detach().clone()
    torch.compile(model, backend=backend, **options)(torch.randn(2, 4))[0].sum().backward()
    torch.optim.AdamW(model.parameters(), weight_decay=0.5).step()
    as_eager = model.unused.weight.grad is None
    assert as_eager == torch.equal(model.unused.weight, before) == (backend == "eager")


def test_a_context_fn_must_not_be_an_inline_lambda() -> None:
    def body(y: T) -> T:
        return y.sin().exp()

    contexts = partial(create_selective_checkpoint_contexts, keep_products)

    def inline(x: T, w: T) -> T:
        return checkpoint(body, x, use_reentrant=False, context_fn=lambda: contexts())  # type: ignore[no-any-return]

    def named(x: T, w: T) -> T:
        return checkpoint(body, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    with pytest.raises(InternalTorchDynamoError, match="checkpoint not implemented for"):
        gradient(inline, compiled(inline, budget=1))
    torch.testing.assert_close(gradient(named, compiled(named, budget=1)), gradient(named))


def test_flops_that_pytorch_does_not_count() -> None:
    x, query = torch.randn(5, 3, 8), weight(1, 2, 16, 8)
    lstm = nn.LSTM(8, 8)

    def counted(run: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    assert counted(lambda: lstm(x)) == 0 < counted(lambda: lstm.double()(x.double()))
    attention = partial(F.scaled_dot_product_attention, query, query, query)
    assert (counted(attention) == 0) is torch_compat.is_before("2.15")
    assert counted(partial(attention, dropout_p=0.1)) > 0


class Tenfold(torch.autograd.Function):
    @staticmethod
    def forward(x: T) -> T:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> T:
        return grads[0] * 10  # type: ignore[no-any-return]


def test_a_compiled_torch_func_grad_drops_the_backward_of_an_autograd_function() -> None:
    x = torch.linspace(-1, 1, 8)
    found = torch.func.grad(lambda x: Tenfold.apply(x).sum())  # type: ignore[no-untyped-call, no-any-return]
    assert torch.equal(found(x), torch.full_like(x, 10))
    dropped = torch_compat.is_before("2.15")
    expected = x.cos() if dropped else torch.full_like(x, 10)
    torch.testing.assert_close(torch.compile(found, backend="eager")(x), expected)


def test_a_complex_pseudoinverse() -> None:
    """Under AOTAutograd the gradient is wrong, with remat too: it stands in the limits."""

    def f(x: T, w: T) -> T:
        return torch.linalg.pinv(torch.complex(x @ w, w[:6].sin())).abs()

    expected = gradient(f)
    assert not far(gradient(f, torch.compile(f, backend="eager")), expected)
    assert far(gradient(f, torch.compile(f, backend="aot_eager")), expected)
    assert far(gradient(f, compiled(f, budget=1)), expected)


class Pair(tuple):  # type: ignore[type-arg]
    def __len__(self) -> int:
        raise NotImplementedError


def test_dynamo_asks_a_tuple_for_its_length() -> None:
    two = Pair((2.0, 3.0))

    def f(x: T, w: T) -> T:
        return x @ w * two[0] + two[1]

    gradient(f)
    with pytest.raises(InternalTorchDynamoError, match="NotImplementedError"):
        gradient(f, torch.compile(f, backend="eager"))


def test_a_knapsack_of_pytorchs_exceeds_its_capacity() -> None:
    """Memory is rounded to ten-thousandths of the total, so each of 3,000 equal items counts for less."""
    count = 3_000
    room = sum([1 / count] * count) / 2
    _, taken, _ = dp_knapsack([1 / count] * count, [1.0] * count, room)
    assert len(taken) / count > 1.1 * room
    assert dp_knapsack_sliding_hirschberg([1e-4] * 3, [1.0] * 3, 1e-4)[1] == [0, 1]
    problem = remat.KnapsackProblem((1,) * count, (1,) * count, count // 2)
    assert len(remat.solve(problem, "dp").saved) == count // 2


def test_the_knee_saves_half_of_what_the_budget_allows() -> None:
    """Of PyTorch's solvers, one saves far less than asked; from budget 0.6 on, no budget changes the plan."""
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)]
    model, x = nn.Sequential(*layers), torch.randn(64, 32)

    def theirs(budget: float, solver: str = "dp") -> int:
        with functorch_config.patch(activation_memory_budget_solver=solver):
            return saved_bytes(model, x, budget, False, **THEIRS)

    most = theirs(1)
    assert theirs(0.5, "dynamic_memory_budget_dp") < 0.3 * most < 0.4 * most < theirs(0.5)
    assert theirs(0.6) == theirs(0.9) < 0.65 * most
    joint = remat.capture(model, (x,))
    bytes_at_1 = remat.plan(joint, 1).saved_bytes
    for ratio in (0.6, 0.9):
        assert ratio - 0.1 < remat.plan(joint, ratio).saved_bytes / bytes_at_1 <= ratio


def test_pytorch_refuses_a_plain_function_as_knapsack_solver() -> None:
    def nothing(memory: Any, runtimes: Any, room: float) -> Any:
        return 0.0, [], list(range(len(memory)))

    def f(x: T, w: T) -> T:
        return ((x @ w).sin() @ w).exp().sin() @ w

    refused = pytest.raises(BackendCompilerFailed, match="Not aware of memory budget knapsack")
    with functorch_config.patch(activation_memory_budget_solver=nothing), refused:
        gradient(f, by_pytorch(f, 0.1))


def test_a_chunked_loss_under_autocast() -> None:
    """PyTorch's chunked loss ignores autocast, and rounds the loss; a chunked plan does neither."""
    head, x, target = nn.Linear(16, 1000), torch.randn(64, 16), torch.arange(64)

    def theirs(x: T, options: Any) -> T:
        return F.linear_cross_entropy(x, head.weight, target, options=options)

    def ours(x: T) -> T:
        return F.cross_entropy(F.linear(x, head.weight), target)

    with torch.autocast("cpu", torch.bfloat16):
        whole, options = ours(x), nn.LinearCrossEntropyOptions()
        torch.testing.assert_close(theirs(x, None), whole)
        assert theirs(x.bfloat16(), options).dtype is torch.bfloat16 is not whole.dtype
        assert not torch.equal(theirs(x, options), whole)
        torch.testing.assert_close(compiled(ours, chunk=8)(x), whole)
    assert "chunk-loss" in remat.plans()[-1].chunk


def test_a_dynamic_graph_shadows_the_static_one() -> None:
    ran: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        is_dynamic = any(isinstance(value, torch.SymInt) for value in inputs)

        def run(*args: Any) -> Any:
            ran.append(is_dynamic)
            return graph(*args)

        return run

    step = torch.compile(lambda x: x.sin() + 1, backend=backend)
    for batch in (8, 5, 8):
        step(torch.ones(batch, 4))
    assert ran == [False, True, True]


def test_batched_gradients_of_a_compiled_step() -> None:
    def gradients(**how: Any) -> T:
        torch._dynamo.reset()
        x = torch.linspace(0, 1, 4).requires_grad_()
        y = torch.compile(torch.sin, fullgraph=True, **how)(x)
        return torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)[0]

    options = {"backend": "remat", "options": {"lower": "eager"}}
    torch.testing.assert_close(gradients(**options), gradients(backend="aot_eager"))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        gradients(backend="inductor")


def test_copies_of_a_compiled_module_are_not_compiled() -> None:
    """The copy is right, but runs in eager mode; one of ``torch.compile(model)`` has a plan."""
    model, x = nn.Sequential(TwoBranches()), torch.randn(2, 4)
    model[0].compile(backend="remat", options={"lower": "eager"})
    wrapped = torch.compile(TwoBranches(), backend="remat", options={"lower": "eager"})
    for original, plans in ((model, 0), (wrapped, 1)):
        before = len(remat.plans())
        copy.deepcopy(original)(x)[0].sum().backward()
        assert len(remat.plans()) - before == plans
    model(x)[0].sum().backward()
    assert model[0].used.weight.grad is not None
