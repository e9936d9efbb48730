"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remat
from remat.cli import hf, models
from tests.cli.command import run, shown, told
from tests.cli.conftest import BLOCKS

MODELS = '''
print("nets.py is imported")

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
RAISES = (BLOCKS + MODELS).splitlines().index('    return {}["nothing here"]') + 1


def test_plan_prints_the_figures_that_the_library_gives() -> None:
    done = run("plan", "nets.py:mlp", "--budget", "0.5", "--explain")
    assert done.exit_code == 0, done.output
    example = models.load("nets.py:mlp")
    made = remat.plan(remat.capture(example.model, example.args), 0.5)
    timed = "  decided by"  # with the seconds that it took
    for line in made.explain().splitlines():
        assert line.startswith(timed) or line in done.stdout.splitlines()
    assert re.search(rf"decided by +{made.solver}", done.stdout)
    assert "nets.py is imported" in done.stderr


def test_plan_packs_what_it_saves() -> None:
    plain, packed = (
        told("plan", "nets.py:mlp", "--budget", "1", *hooks) for hooks in ((), ("--hooks", "bf16"))
    )
    assert packed["saved"] == plain["saved"]
    assert packed["saved_bytes"] < plain["saved_bytes"]


def test_plan_offloads_what_pays_and_says_what_it_needs() -> None:
    asked = ("plan", "nets.py:mlp", "--lower", "eager")
    model = ("--budget", "peak:0.2", "--cost", "roofline:epyc", "--json")
    plan = remat.Plan.from_json(shown(*asked, "--offload", "100TB/s", *model))
    assert plan.link == "100000 GB/s"
    assert plan.gap >= 0
    without = remat.Plan.from_json(shown(*asked, *model))
    assert plan.recompute_cost + plan.exposed_time <= without.recompute_cost


def test_plan_saves_what_it_prints_and_the_plan_can_be_used(folder: Path) -> None:
    printed = shown("plan", "nets:mlp", "--json", "--save", "plan.json", "--lower", "eager")
    assert printed == (folder / "plan.json").read_text()
    saved = remat.Plan.from_json(printed)
    example = models.load("nets.py:mlp")
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
    done = run("plan", "nets.py:mlp", "--budget", "0.5", "--save", "plan.json")
    assert done.exit_code == 130
    assert done.output == "interrupted\n"
    assert not (folder / "plan.json").exists()


def test_keyword_arguments_and_functions_are_models_too() -> None:
    shown("plan", "nets.py:keywords")


def test_a_function_is_called_with_the_batch() -> None:
    few, many, usual = (
        told("plan", "nets.py:sized", *batch)["full_bytes"]
        for batch in (("--batch", "4"), ("--batch", "8"), ())
    )
    assert few < many == usual


def test_a_budget_on_the_peak_tells_what_is_expected_of_compiled_code() -> None:
    asked = ("plan", "nets.py:mlp", "--budget", "peak:0.5")
    assert "is expected once Inductor has fused this plan" in shown(*asked)
    assert "as compiled" not in shown(*asked, "--lower", "eager")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "expected file.py:function, package.module:function, or hf:TYPE"),
        (["nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["no_such_module.x:f"], "there is no module 'no_such_module'"),
        (["nets.py:mpl"], "did you mean 'mlp'?"),
        (["nets.py:SEVEN"], "'SEVEN' is of type int"),
        (["nets.py:mlp", "a=1"], "'a=1' is for hf:TYPE only"),
        (["nets.py:mlp", "--seq", "3"], "--seq is for hf:TYPE only"),
        (["nets.py:mlp", "--batch", "3"], "takes no batch"),
        (["hf:lama"], "did you mean 'hf:llama'?"),
        (["hf:clap"], "file.py:function"),
        (["hf:llama", "hidden_sise=64"], "did you mean 'hidden_size'?"),
        (["hf:llama", "num_hidden_layers=many"], "refuses num_hidden_layers=many"),
        (["hf:llama", "64"], "expected key=value"),
        (["hf:vit", "--seq", "64"], "--seq has no meaning for hf:vit"),
        (["nets.py:mlp", "--budget", "nan"], "or a number from 0 to 1"),
        (["nets.py:mlp", "--solver", "cpsatt"], "did you mean 'cpsat'?"),
        (["nets.py:mlp", "--cost", "roofline:h10"], "h100"),
        (["nets.py:mlp", "--time-limit", "nan"], "--time-limit"),
        (["nets.py:mlp", "--time-limit", "soon"], "no number of seconds"),
        (["nets.py:mlp", "--device", "banana"], "'banana' is no device"),
        (["nets.py:mlp", "--lower", "deep"], "inductor"),
        (["nets.py:mlp", "--hooks", "zip"], "'zip'; expected the name of a ready-made pair (bf16"),
        (["nets.py:mlp", "--save", "nowhere/plan.json"], "there is no folder"),
        (["nets.py:mlp", "--save", "."], "is a directory"),
        (["nets.py:mlp", "--budget", "0.5", "--offload", "1GB/s"], "expected a budget on the peak"),
        (["nets.py:breaks", "--run"], "--no-fullgraph"),
        (["nets.py:breaks", "--no-fullgraph", "--plot", "step.svg"], "one graph"),
    ],
)
def test_wrong_usage_is_2(args: list[str], says: str) -> None:
    done = run("plan", *args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "link", "says"),
    [
        *(
            (command, "", "expected the link")
            for command in ("plan", "compare", "explain", "fit", "frontier", "frontier --by peak")
        ),
        ("frontier", "25GB/s", "goes together with '--by peak' only"),
    ],
)
def test_a_link_that_cannot_be_meant_is_wrong_usage(command: str, link: str, says: str) -> None:
    name, *more = command.split()
    memory = ["--memory", "1GiB"] if name == "fit" else []
    done = run(name, "nets.py:mlp", *memory, *more, "--offload", link)
    assert done.exit_code == 2, done.output
    assert says in done.stderr


@pytest.mark.parametrize(
    "option", [("--solvers", "greedy,gredy"), ("--budgets", "0.5,x"), ("--budgets", ",")]
)
def test_wrong_usage_of_lists_is_2(option: tuple[str, str]) -> None:
    assert run("compare", "nets.py:mlp", *option).exit_code == 2


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", f"raised KeyError: 'nothing here' (at {{folder}}/nets.py:{RAISES})"),
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
    done = run("plan", f"nets.py:{function}", "--json")
    assert done.exit_code == 1, done.output
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "CaptureError"
    assert says.format(folder=folder) in error["message"]
    assert "Traceback" not in done.stderr
    people = run("plan", f"nets.py:{function}")
    assert (people.exit_code, people.stdout) == (1, "")
    (line,) = [line for line in people.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: {error['message']}"


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


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("bert", "num_hidden_layers=1 hidden_size=48 intermediate_size=96 vocab_size=99"),
        ("t5", "num_layers=1 d_model=64 d_ff=96 vocab_size=99"),
        ("resnet", "depths=[1,1] hidden_sizes=[16,32] embedding_size=8 layer_type=basic"),
        (
            "mixtral",
            "num_hidden_layers=1 hidden_size=64 intermediate_size=96 vocab_size=99 num_local_experts=2",
        ),
        (
            "whisper",
            "encoder_layers=1 decoder_layers=1 d_model=48 max_source_positions=20 vocab_size=99 "
            "encoder_attention_heads=4 decoder_attention_heads=4 pad_token_id=0",
        ),
    ],
)
def test_transformers_of_each_recipe_are_planned_without_weights(kind: str, overrides: str) -> None:
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


def test_pipes_that_close_leave_no_traceback_and_get_plain_and_uncut_text() -> None:
    script = "set -o pipefail; remat solvers --json | true; COLUMNS=40 remat solvers"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_inputs_that_may_be_refilled_cost_bytes() -> None:
    """Under every command that plans: the sine of the input is what eager autograd saves."""
    plain = told("plan", "nets.py:squared", "--budget", "0")
    asked = ("nets.py:squared", "--no-reread-inputs")
    kept = told("plan", *asked, "--budget", "0")
    assert (plain["reread_inputs"], plain["reread"]) == (True, ["primals_1"])
    assert (kept["reread_inputs"], kept["reread"]) == (False, [])
    assert kept["saved_bytes"] > plain["saved_bytes"]
    assert told("frontier", *asked)["frontiers"][0]["least_bytes"] == kept["saved_bytes"]
    (row,) = told("compare", *asked, "--solvers", "greedy", "--budgets", "0")["rows"]
    assert row["saved_bytes"] == kept["saved_bytes"]
    assert told("capture", *asked, "-o", "squared.json")["least_bytes"] == kept["saved_bytes"]


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
    model = f"nets.py:{function}"
    refused = run(*command, model)
    assert refused.exit_code == 1
    assert f"plan all graphs of the model together: remat plan {model} {needed}\n" in refused.stderr
    assert not any(word in refused.stderr for word in ("fullgraph=", "run=", ".."))


def test_graphs_of_a_broken_model_are_planned_together(folder: Path) -> None:
    text = shown("plan", "nets.py:numbers", "--no-fullgraph", "--run", "--save", "plans.json")
    plans = remat.PlanSet.from_json((folder / "plans.json").read_text())
    assert len(plans) == 2
    assert f"{plans.explain().splitlines()[0]}\n" in text


@pytest.mark.parametrize(
    ("args", "kind", "code", "says"),
    [
        (("plan", "nets.py:nobody"), "UsageError", 2, "has no 'nobody'"),
        (("plan", "nets.py:mlp", "--budget", "8 gigs"), "BadParameter", 2, "no unit of bytes"),
        (("plan", "nets.py:mlp", "--nothing"), "NoSuchOption", 2, "--nothing"),
        (("plan", "nets.py:mlp", "--budget", "peak:1B"), "BudgetError", 1, "infeasible"),
        (("solve", "missing.json"), "BadParameter", 2, "does not exist"),
    ],
)
def test_errors_are_json_where_json_was_asked_for(
    args: tuple[str, ...], kind: str, code: int, says: str
) -> None:
    done = run(*args, "--json")
    assert done.exit_code == code
    assert list(json.loads(done.stdout)) == ["error"]
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == kind
    assert says in error["message"]
    people = run(*args)
    assert (people.exit_code, people.stdout) == (code, "")


def test_plan_draws_and_tells_both_steps(folder: Path) -> None:
    text = shown("plan", "nets.py:mlp", "--budget", "0.3", "--plot", "step.svg")
    for part in ("drawn: step.svg", "instead of", "modelled"):
        assert part in text
    assert "without remat: peak" in (folder / "step.svg").read_text()


def test_the_log_level_is_restored_after_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    before = logging.root.manager.disable
    shown("plan", "nets.py:mlp", "--budget", "0.5")
    assert logging.root.manager.disable == before
