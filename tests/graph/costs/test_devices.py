"""Devices of the roofline: data sheets, TOML files, and this machine, measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat.errors import ProblemError
from remat.graph.costs import Device, Roofline, RooflineFused, calibrate, calibration
from remat.plugins.registry import registry
from tests.graph.costs.pricing import products

MINE = Device(name="mine", label="a box", half_tflops=3, single_tflops=1.5, memory_tbps=1e-2)
TOML = 'name = "mine"\nhalf_tflops = 3\nsingle_tflops = 1.5\nmemory_tbps = 0.01\n'
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration of things so small that it takes no time."""
    monkeypatch.setattr(calibration, "_SIDES", (32,))
    monkeypatch.setattr(calibration, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(calibration, "_RUNS_S", 0.0)
    calibration._calibrated.cache_clear()


@pytest.mark.parametrize("label", ["a box", 'qu"ote \\ tab\t new\nline \x7f µ 😀', ""])
def test_a_device_written_is_the_device_read(tmp_path: Path, label: str) -> None:
    device = dataclasses.replace(MINE, label=label)
    path = device.to_toml(tmp_path / "mine.toml")
    assert Device.from_toml(path) == device
    assert [p.name for p in tmp_path.iterdir()] == ["mine.toml"]


def test_a_roofline_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TOML)
    for name, kind in (("roofline", Roofline), ("roofline-fused", RooflineFused)):
        model = registry().cost_model(f"{name}:mine.toml")
        assert isinstance(model, kind)
        assert model.device == dataclasses.replace(MINE, label="mine")
        assert str(model) == f"{name}:mine.toml"
        assert registry().cost_model(str(model)) == model
    text = "min-cut,knapsack(cost=roofline:mine.toml)"
    assert str(remat.PassManager.parse(text)) == text
    made = remat.plan(products(), 0.3, cost="roofline:mine.toml")
    assert made.cost == "roofline:mine.toml"
    before = registry().cost_model("roofline:mine.toml").key()
    Path("mine.toml").write_text(TOML.replace("1.5", "1.25"))
    after = registry().cost_model("roofline:mine.toml").key()
    assert before != after, "compiled code is cached by the rates, not by the name of a file"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TOML.replace('name = "mine"\n', ""), "missing key 'name'"),
        (TOML + "cores = 2\n", "unknown key 'cores'; expected name, label, half_tflops"),
        (TOML.replace("0.01", '"fast"'), "key 'memory_tbps' is 'fast'; expected a finite number"),
        (TOML.replace("0.01", "0"), "key 'memory_tbps' is 0; .* above 0, in TB/s"),
        (TOML.replace("0.01", "true"), "key 'memory_tbps' is True"),
        (TOML.replace("0.01", "1" + "0" * 400), "key 'memory_tbps' is 10000"),
        (TOML.replace("3", "nan"), "key 'half_tflops' is nan; .* in TFLOP/s"),
        (TOML.replace('"mine"', '""'), "key 'name' is ''"),
        (TOML + "label = 1\n", "key 'label' is 1"),
        ("half_tflops = = 3", "is no TOML"),
        (b"name = '\xff'", "is no TOML"),
    ],
)
def test_a_bad_device_file_is_named_with_its_key(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProblemError, match=rf"device file '.*bad\.toml'.*{says}"):
        registry().cost_model(f"roofline:{path}")


def test_a_device_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"none\.toml' cannot be read: No such file"):
        Roofline.parse(str(tmp_path / "none.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ProblemError, match=r"folder\.toml' cannot be read: Is a directory"):
        Roofline.parse(str(folder))
    with pytest.raises(ProblemError, match=r"mine\.toml' cannot be written: No such file"):
        MINE.to_toml(tmp_path / "no" / "mine.toml")
    with pytest.raises(ProblemError, match=r"must end in '\.toml'"):
        MINE.to_toml(tmp_path / "mine.txt")


@pytest.mark.parametrize("rate", [-1, float("inf"), "1", None])
def test_a_device_refuses_rates_that_are_none(rate: Any) -> None:
    with pytest.raises(ProblemError, match=r"device 'mine': key 'single_tflops' is .* above 0"):
        dataclasses.replace(MINE, single_tflops=rate)


@pytest.mark.slow
def test_the_cpu_is_measured() -> None:
    state = torch.get_rng_state()
    device = calibrate("cpu")
    assert device.name == "cpu"
    assert "thread" in device.label
    # Any machine that runs this lies well within; a rate off by a unit does not.
    assert 1e-4 < device.half_tflops < 1e3
    assert 1e-4 < device.single_tflops < 1e3
    assert 1e-4 < device.memory_tbps < 1e2
    assert 0 < device.draws_tops < 0.1
    assert 0 < device.tanh_tops < 1
    assert 0 < device.pooled_tops < 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("small")
def test_this_machine_is_measured_once_in_a_process() -> None:
    model = Roofline.parse("cpu")
    assert str(model) == "roofline:cpu"
    assert RooflineFused.parse("cpu").device is model.device
    assert registry().cost_model(str(model)) == model
    assert str(Roofline.parse(None)) == "roofline:h100", "the default never depends on the machine"


@without_cuda
@pytest.mark.usefixtures("small")
def test_here_is_the_cpu_where_there_is_no_gpu() -> None:
    assert Roofline.parse("here") == Roofline.parse("cpu")
    for device in ("cuda", "cuda:3"):
        with pytest.raises(ProblemError, match=rf"'{device}' is not here to be measured.*to_toml"):
            Roofline.parse(device)


@pytest.mark.usefixtures("small")
def test_calibration_does_not_mind_what_surrounds_it() -> None:
    with FakeTensorMode(), torch.device("meta"), torch.autocast("cpu"):
        assert calibrate("cpu").single_tflops > 0
    with pytest.raises(ProblemError, match=r"'abacus' is no device: .*expected cpu, cuda or here"):
        calibrate("abacus")
