"""The profiling model: what it runs, what it leaves alone, and what it does where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import remat
from remat.errors import ProblemError
from remat.graph.costs import Profile, Roofline, measure, profile, reporting, store
from remat.graph.costs.devices import Device
from remat.graph.costs.request import request_of
from remat.plugins.registry import registry
from tests.graph.costs.pricing import call_of, costs, symbolic_product
from tests.graphs import joint_of, node, traced, weight

#: Stands in for this machine where something is not measured.
SLOW = Device(name="cpu", half_tflops=1e-3, single_tflops=1e-3, memory_tbps=1e-6)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of each test's own, and no time lost on calibration."""
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "calibrated", lambda device: SLOW)
    monkeypatch.setattr(profile, "_RUNS_S", 0.0)
    new_process()
    return tmp_path / "cache"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call takes 20 ps; the operators that ran, in order."""
    ran: list[str] = []

    def durations_ps(run: Any, device: torch.device, *, seconds: float) -> list[int]:
        ran.append(str(run.func))
        run()
        return [10, 30, 20]

    monkeypatch.setattr(profile, "durations_ps", durations_ps)
    return ran


def new_process() -> None:
    store.store.cache_clear()


def profiled(joint: remat.JointGraph) -> dict[str, int]:
    return costs(joint, Profile())


def fallbacks(joint: remat.JointGraph) -> tuple[str, ...]:
    return Profile().fallbacks(list(joint.graph.nodes))


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (((x @ w).relu() @ w).relu() @ w[:, :2]).view(-1)


def test_each_distinct_call_runs_once_for_all_processes(clock: list[str]) -> None:
    joint = traced(chain, torch.randn(4, 4), torch.randn(4, 4))
    found = profiled(joint)
    ran = ["aten.mm.default", "aten.relu.default", "aten.mm.default"]
    assert clock == ran
    assert {found[n] for n in ("mm", "relu", "mm_1", "relu_1", "mm_2")} == {20}, "the median"
    assert found["view"] == found["slice_1"] == 0
    assert profiled(joint) == found
    new_process()
    assert profiled(joint) == found
    assert clock == ran, "nothing ran again"
    assert fallbacks(joint) == ()


def test_times_belong_to_a_version_of_pytorch_and_a_number_of_threads(
    clock: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = traced(torch.relu, torch.randn(4))
    profiled(joint)
    for place, name, value in (
        (torch, "get_num_threads", lambda: 77),
        (torch, "__version__", "9.9"),
        (torch, "get_float32_matmul_precision", lambda: "medium"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(place, name, value)
            profiled(joint)
    profiled(joint)
    assert len(clock) == 4


def test_a_real_step_is_measured_without_a_trace() -> None:
    table = torch.nn.Embedding(50, 16)
    weight_before = table.weight.detach().clone()

    def f(i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(table(i) @ w), 0.5)
        heads = h.view(2, 4, 8, 2).transpose(1, 2)
        a = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.cross_entropy(a.transpose(1, 2).reshape(8, 16) + h.view(8, 16), i.view(-1))

    joint = joint_of(f, torch.randint(0, 16, (2, 4)), weight(16, 16))
    state = torch.get_rng_state()
    found = profiled(joint)
    assert torch.equal(torch.get_rng_state(), state), "dropout ran, and left the generator alone"
    assert torch.equal(table.weight, weight_before)
    assert table.weight.grad is None
    assert fallbacks(joint) == (), "indices, targets and masks that were made up are valid"
    assert min(found[n] for n in found if n.startswith(("embedding", "native_dropout", "mm"))) > 0
    plan = remat.plan(joint, 0.5, cost="profile")
    assert (plan.cost, plan.unit) == ("profile", "ps")
    assert plan.recompute_cost == remat.plan(joint, 0.5, cost="profile").recompute_cost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int32, torch.bool])
def test_inputs_of_every_kind_can_be_made_up(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 4, dtype=dtype)
    joint = traced(lambda x, y: torch.where(x == y, x.t(), y.expand(4, 4)), x, x[:1])
    assert profiled(joint)["where"] > 0
    assert fallbacks(joint) == ()


def test_tensors_without_a_device_run_here(clock: list[str]) -> None:
    joint = traced(torch.mm, *(torch.empty(4, 4, device="meta") for _ in range(2)))
    assert profiled(joint)["mm"] == 20
    assert request_of(node(joint, "mm")).device == measure.this_device()
    assert fallbacks(joint) == ()


def test_symbolic_sizes_count_by_their_hint(clock: list[str]) -> None:
    joint = symbolic_product()
    assert "float32[6, 5]/[5, 1]" in request_of(node(joint, "mm")).key
    assert profiled(joint)["mm"] == 20


def test_what_cannot_run_falls_back_to_the_roofline_and_is_listed() -> None:
    with torch.library._scoped_library("remat_test_costs", "DEF") as library:
        library.define("fails(Tensor x) -> Tensor")
        library.define("writes(Tensor(a!) x, Tensor y) -> ()")

        def fail(x: torch.Tensor) -> torch.Tensor:
            raise ValueError("a kernel\nin pieces")

        def write(x: torch.Tensor, y: torch.Tensor) -> None:
            x.add_(y)

        library.impl("fails", fail, "CPU")
        library.impl("fails", torch.empty_like, "Meta")
        library.impl("writes", write, "CPU")
        library.impl("writes", lambda x, y: None, "Meta")

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.relu() + torch.ops.remat_test_costs.fails(torch.ops.remat_test_costs.fails(x))
            torch.ops.remat_test_costs.writes(y, x)
            return y

        joint = traced(f, torch.randn(4))
        found = profiled(joint)
        expected = Roofline(SLOW).cost(node(joint, "fails"))
        assert found["fails"] == found["fails_1"] == expected
        assert fallbacks(joint) == (
            "remat_test_costs.fails.default(%1:float32[4]/[1]@cpu) on cpu: "
            "it raised ValueError: a kernel; cost by roofline:cpu",
        )
        assert found["relu"] != Roofline(SLOW).cost(node(joint, "relu"))
        assert found["writes"] > 0, "writing to tensors that were made up harms nobody"
        assert fallbacks(traced(torch.relu, torch.randn(4))) == (), "only this graph's are listed"


def test_effects_and_subgraphs_are_not_run(clock: list[str]) -> None:
    fake = FakeTensorMode().from_tensor(torch.randn(4))
    for target, args, says in (
        (torch.ops._c10d_functional.all_reduce.default, (fake, "sum", "0"), "collectives"),
        (torch.ops.aten._print.default, ("must not be printed",), "effects"),
        (torch.ops.higher_order.cond, (fake,), "higher-order"),
    ):
        made = call_of(target, *args, result=fake)
        assert says in (request_of(made).refusal or "")
        assert Profile().cost(made) == Roofline(SLOW).cost(made)
        assert says in Profile().fallbacks([made])[0]
    backward = call_of(torch.ops.aten.mkldnn_rnn_layer_backward.default, fake, result=fake)
    assert "a form that only its library knows" in (request_of(backward).refusal or "")
    assert clock == []


def test_what_is_too_large_for_the_memory_is_not_run(
    clock: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = traced(torch.relu, torch.randn(2**18))
    monkeypatch.setattr(profile, "free_bytes", lambda device: 3 * 2**20)
    assert profiled(joint)["relu"] == Roofline(SLOW).cost(node(joint, "relu"))
    (line,) = fallbacks(joint)
    assert "it takes 2 MiB, and half of the free memory is 1.5 MiB" in line
    assert clock == []


def test_a_device_that_is_not_here_falls_back(clock: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with FakeTensorMode():
        on_gpu = torch.empty(4, device="cuda")
    relu = call_of(torch.ops.aten.relu.default, on_gpu, result=on_gpu)
    assert Profile().cost(relu) == Roofline().cost(relu)
    (line,) = Profile().fallbacks([relu])
    assert line.endswith("device cuda:0 is not here; cost by roofline:h100")
    assert Profile("cpu").cost(relu) == 20, "unless it is said where to run"
    assert Profile("cpu").fallbacks([relu]) == ()


def test_profile_by_name() -> None:
    assert registry().cost_model("profile") == Profile()
    assert str(registry().cost_model("profile:cpu")) == "profile:cpu"
    assert "threads" in Profile().key() or "thread" in Profile().key()
    with pytest.raises(ProblemError, match=r"'profile:abacus' names no device that is here"):
        registry().cost_model("profile:abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ProblemError, match=r"'profile:cuda' .* write 'profile:cpu'"):
            registry().cost_model("profile:cuda")


def test_what_was_measured_before_an_interruption_is_kept(
    clock: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Any, device: torch.device, *, seconds: float) -> list[int]:
        if len(clock) == 2:
            raise KeyboardInterrupt
        clock.append("")
        return [20]

    joint = traced(chain, torch.randn(4, 4), torch.randn(4, 4))
    with monkeypatch.context() as changed:
        changed.setattr(profile, "durations_ps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            profiled(joint)
    new_process()
    clock.clear()
    profiled(joint)
    assert len(clock) == 1, "two of three calls were on disk"


def test_long_work_reports_progress_and_goes_to_disk_in_between(clock: list[str]) -> None:
    said: list[str] = []
    on_disk: list[int] = []
    joint = traced(chain, torch.randn(4, 4), torch.randn(4, 4))

    def look(text: str) -> None:
        said.append(text)
        other = store.Store(store.cache_path())
        other.merge({})
        on_disk.append(len(other.times))

    with reporting(look):
        profiled(joint)
        profiled(joint)
    assert on_disk == [0, 1, 2, 3]
    assert said == [
        "timing 1 of 3 operators: aten.mm.default",
        "timing 2 of 3 operators: aten.relu.default",
        "timing 3 of 3 operators: aten.mm.default",
        "planning",
    ]
