"""Kernels of both halves are built together: backward is lowered while those of forward are with their compilers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, cpu_vec_isa
from torch._inductor import config as inductor_config

from remat.integrations import inductor_kernels, torch_compile


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every kernel is built here, and none is in a cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with inductor_config.patch(compile_threads=2, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.sin(x @ w) + 0.5
    return x.sum()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 16) * 0.1, torch.randn(16, 16, requires_grad=True)


def test_waits_for_kernels_when_both_halves_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            events.append(name)
            return result

        return noted

    waits = noting("built", async_compile.AsyncCompile.wait)
    lowers = noting("lowered", torch_compile._compile_as_planned)
    monkeypatch.setattr(async_compile.AsyncCompile, "wait", waits)
    monkeypatch.setattr(torch_compile, "_compile_as_planned", lowers)
    x, w = inputs()
    torch.compile(step, backend="remat", options={"budget": 0.3})(x, w).backward()
    assert events == ["lowered", "lowered", "built", "built"]
    assert async_compile.AsyncCompile.wait is waits
    compiled, w.grad = w.grad, None
    step(x, w).backward()
    torch.testing.assert_close(compiled, w.grad)


def test_a_kernel_that_cannot_be_built_is_an_error() -> None:
    x, w = inputs()
    with (
        inductor_config.patch({"cpp.cxx": ("/bin/false",)}),
        pytest.raises(Exception, match=r"(?i)c\+\+|compil"),
    ):
        torch.compile(step, backend="remat", options={"budget": 0.3})(x, w)
    assert async_compile.AsyncCompile.wait.__name__ == "wait"


def test_on_a_gpu_nothing_changes() -> None:
    wait = async_compile.AsyncCompile.wait
    with inductor_kernels.kernels_at_end([torch.empty(1, device="meta")]):
        assert async_compile.AsyncCompile.wait is wait
    with inductor_kernels.kernels_at_end([torch.empty(1)]):
        assert async_compile.AsyncCompile.wait is not wait
    assert async_compile.AsyncCompile.wait is wait


def test_vector_instructions_are_tried_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for them meanwhile waits, and gets what the thread has found; once in a process."""
    begun, go_on, tried_in = threading.Event(), threading.Event(), []

    @functools.cache
    def tried() -> list[str]:
        tried_in.append(threading.current_thread())
        begun.set()
        assert go_on.wait(60)
        return ["avx2"]

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", tried)
    with inductor_kernels.kernels_at_end([torch.empty(1)]):
        assert begun.wait(60)
        go_on.set()
        assert cpu_vec_isa.valid_vec_isa_list() == ["avx2"]
    assert cpu_vec_isa.valid_vec_isa_list is tried
    with inductor_kernels.kernels_at_end([torch.empty(1)]):
        assert cpu_vec_isa.valid_vec_isa_list is tried
    assert len(tried_in) == 1
    assert tried_in[0] is not threading.current_thread()


def test_trying_that_fails_is_an_error_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.cache
    def tried() -> list[str]:
        raise OSError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", tried)
    with inductor_kernels.kernels_at_end([torch.empty(1)]):
        pass
    with (
        inductor_kernels.kernels_at_end([torch.empty(1)]),
        pytest.raises(OSError, match="compiler"),
    ):
        cpu_vec_isa.valid_vec_isa_list()


def test_other_threads_wait_for_their_own_kernels_at_once() -> None:
    """Nobody's wait is noted for another thread, in whichever order they enter and leave."""
    waited: list[str] = []
    compiling, wait = async_compile.AsyncCompile, async_compile.AsyncCompile.wait
    inside, leave = threading.Event(), threading.Event()
    scope = {"name": "first"}

    class Kernels(compiling):
        pass

    def first() -> None:
        with inductor_kernels.kernels_at_end([torch.empty(1)]):
            inside.set()
            assert leave.wait(60)
            with inductor_kernels.run_at_end():
                Kernels().wait(scope)
            waited.append("noted")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with inductor_kernels.kernels_at_end([torch.empty(1)]):
        leave.set()
        thread.join(60)
        assert waited == ["noted"]
        assert compiling.wait is not wait
    Kernels().wait({})
    assert compiling.wait is wait


def test_what_else_is_compiled_meanwhile_runs_at_once() -> None:
    """A cost model, for one, may run compiled code while a step is planned."""
    compiled = torch.compile(lambda x: (x.sin() * 3).exp().sum(0))
    with inductor_kernels.kernels_at_end([torch.empty(1)]):
        assert compiled(torch.zeros(4, 4)).tolist() == [4.0] * 4
