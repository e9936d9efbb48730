"""Ends of loops that Inductor vectorises on a CPU, and kernels that would write beyond a buffer or read one too early."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func

from remat import torch_compat
from remat.integrations import workarounds
from tests.upstream.test_faults import is_read_as_traced, scattered

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def halving(x: torch.Tensor) -> torch.Tensor:
    even, odd = x[:, ::2], x[:, 1::2]
    return (torch.sin(even) * torch.cos(odd)).sum()


def plain(x: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * torch.cos(x)).sum()


@pytest.mark.parametrize(("step", "vectorised"), [(plain, True), (halving, False)])
def test_ends_of_loops_run_one_by_one_in_scans_alone(
    step: Any, vectorised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noting(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch_compat.inductor_config.cpp.enable_loop_tail_vec)
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(torch_compat, "compile_fx_inner", noting)
    torch.compiler.reset()
    with torch_compat.functorch_config.patch(enable_autograd_cache=False):
        torch.compile(step, backend="remat")(torch.randn(3, 10, requires_grad=True))
    assert seen == [vectorised] * 2


@pytest.mark.parametrize(
    ("axes", "sizes", "sound"),
    [
        ([0, 2], [((66, 8, 66), ())], [0, 2]),  # nothing is summed over
        ([0, 1], [((66,), (66,))], [0, 1]),  # next to each other
        ([0, 2], [((66,), (8, 66))], [0, 2]),  # what stands between is summed over, too
        ([0, 2], [((66, 66), ()), ((66, 66), (66,))], [0]),
        ([2], [((66, 66), (66,))], [2]),
    ],
)
def test_kernels_that_would_write_beyond_a_buffer_are_tiled_in_one_axis(
    axes: list[int], sizes: Any, sound: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codegen.cpp import TilingSelect

    def select(self: Any, functions: Any, sizes: Any) -> Any:
        return [16] * len(axes), axes, "statistics"

    monkeypatch.setattr(TilingSelect, "select_tiling", select)
    told = [16] * len(axes), axes, "statistics"
    with ExitStack() as stack:
        workarounds.whole_tiles(torch.fx.Graph(), False, stack)
        found = TilingSelect().select_tiling([], sizes)
        with ThreadPoolExecutor(1) as aside:  # nobody else's kernels change
            assert aside.submit(TilingSelect().select_tiling, [], sizes).result() == told
    assert found == ([16] * len(sound), sound, "statistics")
    assert TilingSelect().select_tiling([], sizes) == told


def test_a_kernel_that_is_formed_anew_still_waits_for_a_scatter() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 17, 22, 26, dtype=torch.float64, requires_grad=True)
    w = torch.randn(17, 17, 3, 3, dtype=torch.float64).mul_(0.1).requires_grad_()
    wanted = torch.autograd.grad(scattered(x, w), (x, w))
    torch.compiler.reset()
    compiled = torch.compile(scattered, backend="remat", options={"budget": 0.0})
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), (x, w)), wanted)


@pytest.mark.parametrize("cached", [False, True])
def test_a_pass_of_the_users_own_runs_before_the_waits_are_kept(cached: bool) -> None:
    class Mine(torch_compat.CustomSchedulerPass):
        def uuid(self) -> str:
            return "mine"

        def __call__(self, nodes: list[Any]) -> list[Any]:
            return nodes[::-1]

    mine, name = Mine(), torch_compat.PRE_FUSION_PASS
    read = SimpleNamespace(name="buf1")
    added: list[Any] = []
    nodes = [
        SimpleNamespace(
            mutation_renames={"buf0": "buf1"},
            read_writes=SimpleNamespace(reads=reads),
            add_fake_dep=added.append,
        )
        for reads in ([read, SimpleNamespace(name="buf2")], [])
    ]
    given: Any = mine if cached else lambda nodes: nodes[::-1]
    with torch_compat.inductor_config.patch({name: given}), ExitStack() as stack:
        workarounds.waits_of_formed_loops(torch.fx.Graph(), True, stack)
        found = getattr(torch_compat.inductor_config, name)
        # Inductor caches no compilation with a pass that is not a `CustomSchedulerPass`.
        assert isinstance(found, torch_compat.CustomSchedulerPass) is cached
        assert found(nodes) == nodes[::-1]
        if cached:
            assert "mine" in found.uuid()
    assert getattr(torch_compat.inductor_config, name) is None
    assert [(d.name, d.mutating_buf) for d in added] == [("buf1", "buf1")]


@pytest.mark.parametrize("size", [[4, 32], [4, 8]])
def test_strided_reads_are_of_traced_layouts(size: list[int]) -> None:
    assert is_read_as_traced(workarounds.compile_graph, size)


def test_strided_reads_around_a_view_stay_as_they_are() -> None:
    """A copy of the view has no memory around it."""
    graph, given = torch.fx.Graph(), torch.randn(8, 4)
    x = graph.placeholder("x")
    x.meta["val"] = given[:4]
    graph.output(graph.call_function(torch.ops.aten.as_strided.default, (x, [6, 4], [4, 1])))
    with ExitStack() as stack:
        workarounds.traced_layouts_of_strided(graph, True, stack)
        assert torch.equal(torch.fx.GraphModule({}, graph)(given[:4]), given[:6])
