"""Faults of PyTorch that `remat.integrations.workarounds` works around, each shown by a small reproducer.

If a test fails since its fault is gone, say in `workarounds.FIXED_IN` which version mended it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import fresh_cache
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import remat
from remat import torch_compat
from remat.graph.capture import tangents
from remat.integrations import masks, replaced_methods, workarounds
from tests.hard.test_custom_operators import Shifted, Tallied

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
T = torch.Tensor


def planned_layouts_of_draws() -> bool:
    """A draw is made again in the layout that Inductor gave to a convolution, not in that of the graph."""
    rand = torch.ops.aten.rand_like.default
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3), torch.get_rng_state()
    graph = fx.Graph()
    with tracing(TracingContext(mode)):
        fakes = [mode.from_tensor(value) for value in real]
        x, w, state = (graph.placeholder(name) for name in ("x", "w", "state"))
        for node, fake in zip((x, w, state), fakes, strict=True):
            node.meta["val"] = fake
        conv = torch.ops.aten.convolution.default
        shape = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        made = graph.call_function(conv, (x, w, None, *shape))
        drawn = graph.call_function(run_with_rng_state, (state, rand, made))
        with mode:
            made.meta["val"] = drawn.meta["val"] = conv(fakes[0], fakes[1], None, *shape)
        graph.output((drawn,))
        run = compile_fx_inner(fx.GraphModule({}, graph), fakes)
    (found,) = run(list(real))
    expected = run_with_rng_state(real[2], rand, conv(real[0], real[1], None, *shape))
    return not torch.equal(found, expected)


def is_read_as_traced(compile_graph: Callable[..., Any], size: list[int]) -> bool:
    """Whether `as_strided` of a sum reads the traced layout, not that of a value that backward gets."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = torch.randn(4, 1, 4, 8).permute(0, 3, 2, 1)  # the traced value is contiguous
    graph = fx.Graph()
    aten = torch.ops.aten
    with tracing(TracingContext(mode)), mode:
        value = torch.empty(4, 8, 4, 1)
        x = graph.placeholder("x")
        added = graph.call_function(aten.add.Tensor, (x, 1.0))
        read = graph.call_function(aten.as_strided.default, (added, size, [32, 1]))
        x.meta["val"], added.meta["val"] = mode.from_tensor(given), value
        read.meta["val"] = value.as_strided(size, [32, 1])
        graph.output((read,))
    with tracing(TracingContext(mode)):
        run = compile_graph(fx.GraphModule({}, graph), [x.meta["val"]])
    (found,) = run([given])
    return torch.equal(found, (given + 1.0).reshape(4, 32)[:, : size[1]])


def traced_layouts_of_strided() -> bool:
    """`as_strided` reads the layout of a value that backward gets, not the traced one."""
    return not is_read_as_traced(compile_fx_inner, [4, 32])


def saved_inputs_themselves() -> bool:
    """Forward hands backward copies of the inputs of a convolution."""
    x, w = (torch.randn(shape, requires_grad=True) for shape in ((2, 8, 16, 16), (8, 8, 3, 3)))
    held: list[int] = []

    def pack(value: T) -> T:
        held.append(value.data_ptr())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        torch.compile(lambda x, w: F.conv2d(x, w).sin().sum())(x, w)
    return not {x.data_ptr(), w.data_ptr()} <= set(held)


def is_wrong(model: nn.Module, x: T, backward: bool) -> bool:
    """Whether buffers, and gradients if backward runs, differ from those of eager PyTorch."""
    found = []
    for compiled in (True, False):
        own = copy.deepcopy(model)
        loss = (torch.compile(own) if compiled else own)(x).square().sum()
        if backward:
            loss.backward()
        found.append([*(p.grad for p in own.parameters() if backward), *own.buffers()])
    return any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(*found, strict=True))


def no_unsound_reinplacing() -> bool:
    """An operator writes to an input whose former value is returned, or read in other places (mended in 2.15)."""
    torch.manual_seed(0)
    # Of the first, forward leaves a wrong buffer.
    assert is_wrong(Shifted(), torch.randn(4, 6), False) is torch_compat.is_before("2.15")
    return is_wrong(Tallied(), torch.randn(4, 8), True)


def clones_of_written() -> bool:
    """Without the reinplacing pass, a custom operator writes to its input although a clone was due."""
    model = Tallied()
    with inductor_config.patch(disabled_passes="reinplace_inplaceable_ops"):
        return is_wrong(model, torch.randn(4, 8), True)


def rounded_on_cpu() -> bool:
    """A kernel on a CPU keeps 32 bits of a result although each result was to be rounded to 16."""
    x = torch.randn(64).bfloat16()

    def f(x: T) -> T:
        return x.exp().sin()

    with inductor_config.patch(emulate_precision_casts=True):
        return not torch.equal(torch.compile(f)(x), f(x))


def replays_on_fakes() -> bool:
    """The generator's state that was kept on fake tensors is refused where a draw is made again."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, rand = mode.from_tensor(torch.empty(8, 16)), torch.ops.aten.rand_like.default
    with tracing(TracingContext(mode)), mode:
        state, _ = run_and_save_rng_state(rand, x)
        try:
            run_with_rng_state(state, rand, x)
        except Exception as error:
            return "convert all Tensors to FakeTensors" in str(error)
    return False


#: From pytorch/pytorch issue 196681; it may end its process.
_TILES = """
import torch, torch.nn.functional as F
def f(x):
    v = F.gelu(x)
    return F.pad(v, (0, 0, 0, 0, 0, 58), value=0.5) @ F.pad(v.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
x = torch.randn(1, 8, 66, 66).contiguous(memory_format=torch.channels_last)
raise SystemExit(77 * int((torch.compile(f)(x) - f(x)).abs().max() > 1e-2))
"""


def whole_tiles() -> bool:
    """A kernel that is tiled in two axes writes a whole vector at the end of a row."""
    # The process compiles the kernel itself, and does not probe the instruction sets of the processor.
    quick = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    code = subprocess.run(
        [sys.executable, "-c", _TILES], capture_output=True, env={**os.environ, **quick}
    ).returncode
    assert code in (0, 77) or code < 0, "it ended by another error"
    return code != 0


def scattered(x: T, w: T) -> T:
    """Reads what a scatter wrote, by kernels whose loops Inductor forms anew."""
    places = torch.arange(13).expand(2, 17, 22, 13)
    made = F.conv2d(x[..., :13], w, padding=1)
    spread = x.new_zeros(2, 17, 22, 26).scatter(3, places, made)
    return F.conv2d(spread * spread, w, padding=1).sin().sum()


def waits_of_formed_loops() -> bool:
    """A kernel that reads what a scatter wrote is moved ahead of it, since its loops were formed anew."""
    from torch._inductor.scheduler import SchedulerNode

    theirs: Any = SchedulerNode.recompute_size_and_body

    def form(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        before = {d.name for d in self.read_writes.reads}
        theirs(self, *args, **kwargs)
        if before != {d.name for d in self.read_writes.reads}:
            raise RuntimeError("a read was lost")  # no kernel is compiled to see the rest

    x = torch.randn(2, 17, 22, 26, dtype=torch.float64, requires_grad=True)
    w = torch.randn(17, 17, 3, 3, dtype=torch.float64, requires_grad=True)
    with (
        pytest.MonkeyPatch.context() as patched,
        functorch_config.patch(activation_memory_budget=0.0, enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        patched.setattr(SchedulerNode, "recompute_size_and_body", form)
        try:
            torch.compile(scattered)(x, w).backward()
        except Exception as error:
            if "a read was lost" not in str(error):
                raise
            return True
    return False


def near_fusions() -> bool:
    """Gradients of weights that are used again are summed at the end, with all that is summed alive until then."""
    torch.manual_seed(0)
    wide, narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def f(x: T) -> T:
        for _ in range(4):
            x = narrow(F.silu(wide(x).sin())) + x
        return x

    compile_step = remat.backend(
        budget=1.0, cost="roofline:h100", solver="lagrangian", fx_graph_cache=False
    )
    begin = replaced_methods.GeneratedCode.__init__

    steps = []  # a plan has modules as long as its step exists

    def generate(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        """Plans by the peak of the generated code, whose kernels are not compiled: that takes the longest."""
        steps.append(compile_step(gm, inputs))
        return gm.forward

    all_of_them = workarounds.WORKAROUNDS
    without = tuple(one for one in all_of_them if one is not workarounds.near_fusions)
    for applied in (without, all_of_them):
        torch.compiler.reset()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(workarounds, "WORKAROUNDS", applied)
            patched.setattr(
                replaced_methods.GeneratedCode,
                "__init__",
                lambda self, _, path: begin(self, lambda: None, path),
            )
            torch.compile(f, backend=generate)(torch.randn(256, 64, requires_grad=True))
    far, near = remat.plans()[-2:]
    assert near.planned_peak_bytes, "the peak is that of the generated code"
    assert near.estimated_peak_bytes == pytest.approx(near.peak_bytes, rel=0.01)
    return far.peak_bytes > 1.2 * near.peak_bytes


def masks_to_bytes() -> bool:
    """Booleans are written to memory one by one: the same mask as bytes takes a fortieth of the time."""

    def relu(x: T, kind: torch.dtype) -> tuple[T, T]:
        mask = x > 0
        kept = torch.ops.prims.convert_element_type.default(mask.to(torch.float32), kind)
        return torch.where(mask, x, 0.0), kept

    x = torch.randn(2_000_000)
    taken = []
    for kind in (torch.bool, torch.uint8):
        compiled = torch.compile(relu)
        compiled(x, kind)
        taken.append(min(_processor_time(compiled, x, kind) for _ in range(5)))
    return taken[0] > 4 * taken[1]


def _processor_time(call: Callable[..., Any], *args: Any) -> float:
    start = time.process_time()
    call(*args)
    return time.process_time() - start


def allow_keeping_the_graph() -> bool:
    """A backward that was compiled before forward ran refuses to keep the graph."""
    w = torch.randn(8, 8, requires_grad=True)
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        out = torch.compile(lambda x, w: (x @ w).sin().sum())(torch.randn(8, 8), w)
        try:
            out.backward(retain_graph=True)
        except RuntimeError as error:
            return "donated buffers" in str(error)
    return False


def layouts_of_tangents() -> bool:
    """A tangent is copied into the layout of an output whose elements share memory."""
    found = []
    for backend in ("eager", "aot_eager"):
        x = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_()
        out = torch.compile(lambda x: (x * x).unfold(0, 2, 1), backend=backend)(x)
        (out * torch.arange(8.0).reshape(2, 2, 2)).sum().backward()
        found.append(x.grad)
    return not torch.equal(*found)


def sound_donation() -> bool:
    """A backward from Inductor's cache overwrites the logits that another step returns beside its loss."""

    def loss_alone(x: T, w: T) -> T:
        return ((x @ w).sin() @ w).exp().sum()

    def loss_and_logits(x: T, w: T) -> tuple[T, T]:
        logits = (x @ w).sin() @ w
        return logits.exp().sum(), logits.detach()

    def compiled(step: Callable[..., Any]) -> Any:
        torch.compiler.reset()
        torch.manual_seed(0)
        return torch.compile(step)(*(torch.randn(8, 8, requires_grad=True) for _ in range(2)))

    with fresh_cache(), functorch_config.patch(donated_buffer=True):
        compiled(loss_alone).backward()
        loss, logits = compiled(loss_and_logits)
        before = logits.clone()
        loss.backward()
    return not torch.equal(logits, before)


FAULTS: tuple[Callable[[], bool], ...] = (
    planned_layouts_of_draws,
    traced_layouts_of_strided,
    saved_inputs_themselves,
    no_unsound_reinplacing,
    clones_of_written,
    rounded_on_cpu,
    replays_on_fakes,
    whole_tiles,
    waits_of_formed_loops,
    near_fusions,
    masks_to_bytes,
    allow_keeping_the_graph,
    layouts_of_tangents,
    sound_donation,
)
#: The files of workarounds.
HOMES = (workarounds, masks, tangents)
#: Wrong tails were seen once, on one processor, and not found again. Which operators are moved past one another depends
#: on all of a graph, and no small one is known in which draws are.
NOT_REPRODUCED = {"scalar_tails", "planned_order"}


def test_every_workaround_has_a_reproducer() -> None:
    known = {f.__name__ for f in FAULTS} | NOT_REPRODUCED
    assert known >= {f.__name__ for f in workarounds.WORKAROUNDS}
    assert all(any(hasattr(home, name) for home in HOMES) for name in known)
    assert workarounds.FIXED_IN.keys() <= known


#: Those of vectorised loops.
VECTORISED = (whole_tiles, masks_to_bytes)


@pytest.mark.parametrize(
    "shows",
    [pytest.param(f, marks=[pytest.mark.vectorised] * (f in VECTORISED)) for f in FAULTS],
    ids=lambda f: f.__name__,
)
def test_the_fault_is_there_while_it_is_worked_around(shows: Callable[[], bool]) -> None:
    there = next(f for home in HOMES if (f := getattr(home, shows.__name__, None)))
    assert shows() is workarounds.is_needed(there)


def test_a_workaround_is_applied_up_to_the_version_that_mends_the_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[str] = []

    def noting(graph: fx.Graph, is_backward: bool, stack: contextlib.ExitStack) -> None:
        applied.append("noted")

    monkeypatch.setattr(workarounds, "WORKAROUNDS", (noting,))
    monkeypatch.setattr(torch_compat, "compile_fx_inner", lambda gm, inputs, **_: gm)
    gm = fx.symbolic_trace(nn.Tanh())
    for fixed_in, times in (("", 1), ("99.0", 2), ("2.13", 2)):
        monkeypatch.setattr(workarounds, "FIXED_IN", {"noting": fixed_in} if fixed_in else {})
        assert workarounds.compile_graph(gm, []) is gm
        assert len(applied) == times
