"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import remat
from remat import files
from remat.cli import hf, main, models
from remat.errors import CaptureError

MODELS = '''
import torch

print("models.py is imported")

def mlp():
    with torch.device("meta"):
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
    return torch.nn.Sequential(*layers), (torch.zeros(8, 64),)

def sized(batch=8):
    model, _ = mlp()
    return model, (torch.zeros(batch, 64),)

def squared():
    weight = torch.nn.Parameter(torch.ones(8, 8))
    return (lambda x: (x.sin() @ weight).sin().sum()), (torch.zeros(8, 8),)

def keywords():
    x = torch.ones(3, requires_grad=True)
    return (lambda x, *, y: (x * y).sin().sum()), [x], {"y": torch.ones(3)}

def raises():
    return {}["nothing here"]

def leaves():
    raise SystemExit("gone")

def only_model():
    return torch.nn.Linear(2, 2)

def bare_tensor():
    return torch.nn.Linear(2, 2), torch.ones(2)

def no_model():
    return 7, ()

def frozen():
    return torch.nn.Linear(2, 2).requires_grad_(False), (torch.ones(2),)

class Fails(torch.nn.Module):
    def forward(self, x):
        raise ValueError("boom in forward")

def fails():
    return Fails(), (torch.ones(2, requires_grad=True),)

def broken(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos().sum()

def breaks():
    return broken, (torch.ones(4, requires_grad=True),)

def numbers():
    def branch(x):
        y = x.sin().exp().sin()
        if y.sum() > 0:
            y = y.cos().exp()
        return y.sum()
    return branch, (torch.ones(4, requires_grad=True),)

def overwritten():
    def f(x):
        h = x.exp()
        y = h * 2
        h.add_(1)
        return y.sum()
    return f, (torch.ones(4, requires_grad=True),)

SEVEN = 7
'''  # fmt: skip
#: The line that raises.
RAISES = MODELS.splitlines().index('    return {}["nothing here"]') + 1


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with models in it, and an interpreter that forgets them."""
    (tmp_path / "some_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("some_models", "broken")):
            del sys.modules[name]


def run(*args: str) -> Result:
    """A command that does not tell its stages; what it tells of them has tests of its own."""
    return CliRunner().invoke(main, [*args, "--quiet"])


def test_plan_prints_the_figures_that_the_library_gives() -> None:
    done = run("plan", "some_models.py:mlp", "--budget", "0.5", "--explain")
    assert done.exit_code == 0, done.output
    example = models.load("some_models.py:mlp")
    made = remat.plan(remat.capture(example.model, example.args), 0.5)
    timed = "  decided by"  # with the seconds that it took
    for line in made.explain().splitlines():
        assert line.startswith(timed) or line in done.stdout.splitlines()
    assert re.search(rf"decided by +{made.solver}", done.stdout)
    assert "models.py is imported" in done.stderr


def test_plan_packs_what_it_saves() -> None:
    plain, packed = (
        json.loads(run("plan", "some_models.py:mlp", "--budget", "1", "--json", *hooks).stdout)
        for hooks in ((), ("--hooks", "bf16"))
    )
    assert packed["saved"] == plain["saved"]
    assert packed["saved_bytes"] < plain["saved_bytes"]
    refused = run("plan", "some_models.py:mlp", "--hooks", "zip")
    assert refused.exit_code == 2
    assert "'zip'; expected the name of a ready-made pair (bf16, float8" in refused.output


def test_plan_offloads_what_pays_and_says_what_it_needs() -> None:
    asked = ("plan", "some_models.py:mlp", "--lower", "eager", "--offload", "100TB/s")
    model = ("--budget", "peak:0.2", "--cost", "roofline:epyc")
    plan = remat.Plan.from_json(run(*asked, *model, "--json").stdout)
    assert plan.link == "100000 GB/s"
    assert plan.gap >= 0
    without = remat.Plan.from_json(run(*asked[:4], *model, "--json").stdout)
    assert plan.recompute_cost + plan.exposed_time <= without.recompute_cost
    refused = run(*asked, "--budget", "0.5")
    assert refused.exit_code == 2
    assert "expected a budget on the peak" in refused.output


def test_plan_saves_what_it_prints_and_the_plan_can_be_used(folder: Path) -> None:
    done = run("plan", "some_models:mlp", "--json", "--save", "plan.json", "--lower", "eager")
    assert done.exit_code == 0, done.output
    assert done.stdout == (folder / "plan.json").read_text()
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".py") >= ["plan.json"]
    assert not list(folder.glob(".*part"))
    saved = remat.Plan.from_json(done.stdout)
    example = models.load("some_models.py:mlp")
    joint = remat.capture(example.model, example.args, lower="eager")
    assert remat.plan(joint, plan=saved).saved == saved.saved


@pytest.mark.parametrize("where", ["remat.cli.models.load", "remat.units.Budget.parse"])
def test_ctrl_c_is_told_from_failure(
    where: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """While work is done, and while options are read."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    done = run("plan", "some_models.py:mlp", "--budget", "0.5", "--save", "plan.json")
    assert done.exit_code == 130
    assert done.output == "interrupted\n"
    assert not (folder / "plan.json").exists()


def test_keyword_arguments_and_functions_are_models_too() -> None:
    assert run("plan", "some_models.py:keywords").exit_code == 0


def test_python_runs_the_command_by_the_package_s_name() -> None:
    told = [sys.executable, "-m", "remat", "--version"]
    done = subprocess.run(told, capture_output=True, text=True, check=True)
    assert done.stdout == f"remat, version {remat.__version__}\n"


def test_a_function_is_called_with_the_batch() -> None:
    few, many = (
        json.loads(run("plan", "some_models.py:sized", "--batch", b, "--json").stdout) for b in "48"
    )
    assert few["full_bytes"] < many["full_bytes"]
    usual = json.loads(run("plan", "some_models.py:sized", "--json").stdout)
    assert usual["full_bytes"] == many["full_bytes"]


def test_a_budget_on_the_peak_tells_what_is_expected_of_compiled_code() -> None:
    done = run("plan", "some_models.py:mlp", "--budget", "peak:0.5")
    assert "is expected once Inductor has fused this plan" in done.stdout
    done = run("plan", "some_models.py:mlp", "--budget", "peak:0.5", "--lower", "eager")
    assert "as compiled" not in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "expected file.py:function, package.module:function, or hf:TYPE"),
        (["nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["no_such_module.x:f"], "there is no module 'no_such_module'"),
        (["some_models.py:mpl"], "did you mean 'mlp'?"),
        (["some_models.py:SEVEN"], "'SEVEN' is of type int"),
        (["some_models.py:mlp", "a=1"], "'a=1' is for hf:TYPE only"),
        (["some_models.py:mlp", "--seq", "3"], "--seq is for hf:TYPE only"),
        (["some_models.py:mlp", "--batch", "3"], "takes no batch"),
        (["hf:lama"], "did you mean 'hf:llama'?"),
        (["hf:clap"], "file.py:function"),
        (["hf:llama", "hidden_sise=64"], "did you mean 'hidden_size'?"),
        (["hf:llama", "num_hidden_layers=many"], "refuses num_hidden_layers=many"),
        (["hf:llama", "64"], "expected key=value"),
        (["hf:vit", "--seq", "64"], "--seq has no meaning for hf:vit"),
        (["some_models.py:mlp", "--budget", "nan"], "or a number from 0 to 1"),
        (["some_models.py:mlp", "--budget", "-1"], "or a number from 0 to 1"),
        (["some_models.py:mlp", "--budget", "1.5"], "a ratio above 1"),
        (["some_models.py:mlp", "--budget", "8 bananas"], "'bananas' is no unit of bytes"),
        (["some_models.py:mlp", "--solver", "cpsatt"], "did you mean 'cpsat'?"),
        (["some_models.py:mlp", "--cost", "rooflin"], "did you mean 'roofline'?"),
        (["some_models.py:mlp", "--cost", "roofline:h10"], "h100"),
        (["some_models.py:mlp", "--time-limit", "nan"], "--time-limit"),
        (["some_models.py:mlp", "--time-limit", "soon"], "no number of seconds"),
        (["some_models.py:mlp", "--device", "banana"], "'banana' is no device"),
        (["some_models.py:mlp", "--lower", "deep"], "inductor"),
        (["some_models.py:mlp", "--save", "nowhere/plan.json"], "there is no folder"),
        (["some_models.py:mlp", "--save", "."], "is a directory"),
    ],
)
def test_wrong_usage_is_2(args: list[str], says: str) -> None:
    done = run("plan", *args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", ["plan", "compare", "explain", "fit", "frontier", "frontier --by peak"]
)
def test_an_empty_link_is_wrong_usage(command: str) -> None:
    name, *more = command.split()
    memory = ["--memory", "1GiB"] if name == "fit" else []
    done = run(name, "some_models.py:mlp", *memory, *more, "--offload", "")
    assert done.exit_code == 2, done.output
    assert "expected the link" in done.stderr


def test_wrong_usage_of_lists_is_2() -> None:
    assert run("compare", "some_models.py:mlp", "--solvers", "greedy,gredy").exit_code == 2
    assert run("compare", "some_models.py:mlp", "--budgets", "0.5,x").exit_code == 2
    assert run("compare", "some_models.py:mlp", "--budgets", ",").exit_code == 2


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", f"raised KeyError: 'nothing here' (at {{folder}}/some_models.py:{RAISES})"),
        ("leaves", "raised SystemExit: gone"),
        ("only_model", "returned a Linear; expected (model, args) or (model, args, kwargs)"),
        ("bare_tensor", "returned a Tensor as args; expected"),
        ("no_model", "returned a int as model; expected"),
        ("frozen", "nothing to differentiate"),
        ("fails", "boom in forward"),
        ("overwritten", "PyTorch fails at this program without remat as well"),
    ],
)
def test_a_model_that_cannot_be_planned_is_1(folder: Path, function: str, says: str) -> None:
    done = run("plan", f"some_models.py:{function}", "--json")
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)["error"]
    assert told["kind"] == "CaptureError"
    assert says.format(folder=folder) in told["message"]
    assert "Traceback" not in done.stderr
    people = run("plan", f"some_models.py:{function}")
    assert (people.exit_code, people.stdout) == (1, "")
    (line,) = [line for line in people.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: {told['message']}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:", "SyntaxError"),
        ("import torchh", "ModuleNotFoundError: No module named 'torchh'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_a_file_that_cannot_be_imported_is_1(folder: Path, source: str, says: str) -> None:
    (folder / "broken.py").write_text(source)
    done = run("plan", "broken.py:f")
    assert done.exit_code == 1
    assert says in done.stderr
    assert "broken.py:1" in done.stderr


def test_a_budget_below_the_least_is_1_and_names_the_least() -> None:
    done = run("plan", "hf:gpt2", "n_layer=1", "n_embd=48", "vocab_size=99", "--budget", "saved:2B")
    assert done.exit_code == 1
    assert "must save at least" in done.stderr


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", "num_hidden_layers=1 hidden_size=64 intermediate_size=128 vocab_size=99"),
        ("bert", "num_hidden_layers=1 hidden_size=48 intermediate_size=96 vocab_size=99"),
        ("t5", "num_layers=1 d_model=64 d_ff=96 vocab_size=99"),
        ("vit", "num_hidden_layers=1 hidden_size=48 intermediate_size=96 image_size=32"),
        ("resnet", "depths=[1,1] hidden_sizes=[16,32] embedding_size=8 layer_type=basic"),
        ("mixtral", "num_hidden_layers=1 hidden_size=64 intermediate_size=96 vocab_size=99"),
        (
            "whisper",
            "encoder_layers=1 decoder_layers=1 d_model=48 max_source_positions=20 vocab_size=99 "
            "encoder_attention_heads=4 decoder_attention_heads=4 pad_token_id=0",
        ),
    ],
)
def test_transformers_by_type_are_planned_without_weights(kind: str, overrides: str) -> None:
    example = hf.build(kind, overrides.split(), batch=2)
    assert example.model.training
    assert {p.device.type for p in example.model.parameters()} == {"meta"}
    joint = remat.capture(example.model, example.args, example.kwargs, lower="eager")
    assert remat.plan(joint, 0.5).saved_bytes > 0


def test_a_model_with_dropout_has_it_on() -> None:
    example = hf.build("gpt2", ["n_layer=1", "n_embd=48", "vocab_size=99"], batch=2, seq=16)
    joint = remat.capture(example.model, (), example.kwargs, lower="eager")
    assert any("dropout" in str(n.target) for n in joint.graph.nodes)
    assert example.kwargs["input_ids"].shape == (2, 16)


def test_a_type_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("plan", "hf:llama")
    assert done.exit_code == 2
    assert "pip install 'remat[hf]'" in done.stderr


def test_a_file_is_written_whole_or_not_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder / "plan.json"
    files.write_atomic(target, "first")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(target, "second")
    assert target.read_text() == "first"
    assert [p.name for p in folder.iterdir() if "part" in p.name] == []


def test_the_place_of_an_error_is_the_users_line(folder: Path) -> None:
    with pytest.raises(CaptureError, match=rf"some_models\.py:{RAISES}\)"):
        models.load("some_models.py:raises")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    script = f"set -o pipefail; {command}"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, check=False
    )


def test_a_closed_pipe_leaves_no_traceback() -> None:
    done = shell("remat passes --json | true; remat passes | head -n 1")
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_output_that_is_no_terminal_is_plain_and_uncut() -> None:
    done = shell("COLUMNS=40 remat passes")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert done.stderr == ""
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_inputs_that_may_be_refilled_cost_bytes() -> None:
    """Under every command that plans: the sine of the input is what eager autograd saves."""
    plain = json.loads(run("plan", "some_models.py:squared", "--budget", "0", "--json").stdout)
    asked = ("some_models.py:squared", "--no-reread-inputs", "--json")
    kept = json.loads(run("plan", *asked, "--budget", "0").stdout)
    assert (plain["reread_inputs"], plain["reread"]) == (True, ["primals_1"])
    assert (kept["reread_inputs"], kept["reread"]) == (False, [])
    assert kept["saved_bytes"] > plain["saved_bytes"]
    frontier = json.loads(run("frontier", *asked).stdout)["frontiers"][0]
    assert frontier["least_bytes"] == kept["saved_bytes"]
    compared = json.loads(run("compare", *asked, "--solvers", "greedy", "--budgets", "0").stdout)
    assert compared["rows"][0]["saved_bytes"] == kept["saved_bytes"]
    captured = json.loads(run("capture", *asked, "-o", "squared.json").stdout)
    assert captured["least_bytes"] == kept["saved_bytes"]


@pytest.mark.parametrize(
    ("command", "function", "needed"),
    [
        (["plan"], "breaks", "--no-fullgraph"),
        (["frontier"], "breaks", "--no-fullgraph"),
        (["plan", "--no-fullgraph"], "numbers", "--no-fullgraph --run"),
    ],
)
def test_a_graph_break_is_told_with_options_of_the_command(
    command: list[str], function: str, needed: str
) -> None:
    model = f"some_models.py:{function}"
    refused = run(*command, model)
    assert refused.exit_code == 1
    assert f"plan all graphs of the model together: remat plan {model} {needed}\n" in refused.stderr
    assert not any(word in refused.stderr for word in ("fullgraph=", "run=", ".."))


def test_graphs_of_a_broken_model_are_planned_together(folder: Path) -> None:
    done = run("plan", "some_models.py:numbers", "--no-fullgraph", "--run", "--save", "plans.json")
    assert done.exit_code == 0, done.output
    plans = remat.PlanSet.from_json((folder / "plans.json").read_text())
    assert len(plans) == 2
    assert f"{plans.explain().splitlines()[0]}\n" in done.stdout
    assert run("plan", "some_models.py:breaks", "--run").exit_code == 2


@pytest.mark.parametrize(
    ("args", "kind", "code", "says"),
    [
        (("plan", "some_models.py:nobody"), "UsageError", 2, "has no 'nobody'"),
        (
            ("plan", "some_models.py:mlp", "--budget", "8 gigs"),
            "BadParameter",
            2,
            "no unit of bytes",
        ),
        (("plan", "some_models.py:mlp", "--nothing"), "NoSuchOption", 2, "--nothing"),
        (("plan", "some_models.py:mlp", "--budget", "peak:1B"), "BudgetError", 1, "infeasible"),
        (("solve", "missing.json"), "BadParameter", 2, "does not exist"),
    ],
)
def test_errors_are_json_where_json_was_asked_for(
    args: tuple[str, ...], kind: str, code: int, says: str
) -> None:
    done = run(*args, "--json")
    assert done.exit_code == code
    assert list(json.loads(done.stdout)) == ["error"]
    told = json.loads(done.stdout)["error"]
    assert told["kind"] == kind
    assert says in told["message"]
    assert run(*args).exit_code == code, "the exit code is the same"
    assert run(*args).stdout == ""


def test_what_was_found_stands_beside_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.solvers.greedy import Greedy

    monkeypatch.setattr(Greedy, "cannot_run", classmethod(lambda _: "it is closed today"))
    done = run("compare", "some_models.py:mlp", "--solvers", "greedy", "--budgets", "0.1", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["error"]["kind"] == "RematError"
    assert "closed today" in found["rows"][0]["reason"]


def test_plan_draws_and_tells_both_steps(folder: Path) -> None:
    done = run("plan", "some_models.py:mlp", "--budget", "0.3", "--plot", "step.svg")
    assert done.exit_code == 0, done.output
    assert "drawn: step.svg" in done.stdout
    assert "without remat: peak" in (folder / "step.svg").read_text()
    assert "instead of" in done.stdout
    assert "modelled" in done.stdout
    refused = run("plan", "some_models.py:breaks", "--no-fullgraph", "--plot", "step.svg")
    assert refused.exit_code == 2
    assert "one graph" in refused.stderr


def test_the_log_level_is_restored_after_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    before = logging.root.manager.disable
    assert run("plan", "some_models.py:mlp", "--budget", "0.5").exit_code == 0
    assert logging.root.manager.disable == before


def test_a_frontier_by_saved_bytes_takes_no_link() -> None:
    done = run("frontier", "some_models.py:mlp", "--offload", "25GB/s")
    assert done.exit_code == 2, done.output
    assert "goes together with '--by peak' only" in done.stderr
