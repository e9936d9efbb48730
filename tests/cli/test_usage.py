"""Wrong usage: exit code 2, and one message on standard error that says what was expected."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.command import run

MODELS = '''
SEVEN = 7
'''  # fmt: skip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan nonsense", "expected file.py:function, package.module:function, or hf:TYPE"),
        ("plan nowhere.py:f", "there is no file 'nowhere.py'"),
        ("plan nets.py:block --budget nan", "or a number from 0 to 1"),
        ("plan nets.py:block --solver cpsatt", "did you mean 'cpsat'?"),
        ("plan nets.py:block --cost roofline:h10", "h100"),
        ("plan nets.py:block --time-limit nan", "--time-limit"),
        ("plan nets.py:block --time-limit soon", "is not a valid float"),
        ("plan nets.py:block --device banana", "'banana' is no device"),
        ("plan nets.py:block --lower deep", "inductor"),
        ("plan nets.py:block --hooks zip", "'zip'; expected the name of a ready-made pair (bf16"),
        ("plan nets.py:block --save nowhere/plan.json", "there is no folder"),
        ("plan nets.py:block --save .", "is a directory"),
        (f"plan nets.py:block --save {300 * 'x'}", "cannot be written: File name too long"),
        ("plan nets.py:block --offload ''", "expected the link"),
        ("plan nets.py:block --run", "--no-fullgraph"),
        ("plan nets.py:block --no-fullgraph --plot step.svg", "one graph"),
        ("compare nets.py:block --budgets 0.5,x", "'x'"),
        ("compare nets.py:block --budgets ,", "--budgets"),
        ("compare nets.py:block --offload ''", "expected the link"),
        ("explain nets.py:block --export step.svg", "'step.svg' ends with '.svg'; expected .pickle or .json or .csv"),
        ("explain nets.py:block --export a.csv --export a.csv", "'a.csv' is to be written twice"),
        ("explain nets.py:block --html nowhere/plan.html", "there is no folder"),
        ("explain nets.py:block --html plan.txt", "'plan.txt' ends with '.txt'; expected .html"),
        ("explain nets.py:block --html ''", "the name of the file is empty"),
        ("explain nets.py:block --html plan\udcff.html", "is no text in UTF-8"),
        ("explain nets.py:block --offload ''", "expected the link"),
        ("explain nets.py:block --policy *.mlp=keep", "policy '*.mlp' is 'keep'; expected 'save'"),
        ("explain nets.py:block --host-memory much", "'--host-memory': host_memory is 'much'"),
        ("frontier nets.py:block --plot out.pdf", "expected .svg or .png"),
        ("frontier nets.py:block --plot nowhere/out.svg", "there is no folder"),
        ("frontier nets.py:block --solvers greedy,gredy", "did you mean 'greedy'?"),
        ("policies nets.py:block --budget peak:lots", "expected bytes"),
        ("frontier nets.py:block --offload 25GB/s", "goes together with '--by peak' only"),
        ("frontier nets.py:block --offload ''", "expected the link"),
        ("frontier nets.py:block --by peak --offload ''", "expected the link"),
        ("fit nets.py:block", "--memory"),
        ("fit nets.py:block --memory 80", "did you mean '80GiB'"),
        ("fit nets.py:block --memory 1GiB --batch 0", "batch is 0; expected whole numbers of 1 or more"),
        ("fit nets.py:block --memory 1GiB --batch 1,many", "batch is 'many'"),
        ("fit nets.py:block --memory 1GiB --batch --5", "batch is '--5'"),
        (f"fit nets.py:block --memory 1GiB --batch {5000 * '1'}", "batch is '111"),
        ("fit nets.py:block --memory 1GiB --ranks 0", "'--ranks': ranks is 0; expected a whole number"),
        ("fit nets.py:block --memory 1GiB --ranks two", "'two' is not a valid integer"),
        ("fit nets.py:block --memory 1GiB --accumulate 0", "'--accumulate': accumulate is 0; expected"),
        ("fit nets.py:block --memory 1GiB --link 0", "'--link': link_gbps is 0.0; expected GB/s above 0"),
        ("fit nets.py:block --memory 1GiB --margin 100%", "'--margin': margin is '100%'; expected"),
        ("fit nets.py:block --memory 1GiB --offload ''", "expected the link"),
        ("sac nets.py:block --memory much", "memory is 'much'; expected bytes: an int above 1"),
        ("sac nets.py:block --memory peak:0.5", "memory is 'peak:0.5'; expected bytes: an int above 1"),
        ("sac nets.py:block --memory 0.5 --mode guess", "'guess' is not one of"),
        ("sweep nets.py:block -o table.xlsx", "'table.xlsx' ends with '.xlsx'; expected .jsonl or .json or .csv"),
        ("sweep nets.py:block --jobs 0", "--jobs"),
        ("capture nets.py:block", "--output"),
        ("capture nets.py:block -o nowhere/x.json", "there is no folder"),
        ("capture nets.py:block -o x.json --cost flop", "did you mean 'flops'?"),
        ("solve none.json", "does not exist"),
        ("solve nets.py --solver gredy", "did you mean 'greedy'?"),
        ("solve nets.py --budget -1", "expected bytes of the step's peak"),
        ("solve nets.py --budget peak:0.5", "one for plans"),
        ("opt missing.joint", "there is no file 'missing.joint'; expected a file of graph text"),
        ("opt nets.py:block -o nowhere/out.joint", "there is no folder"),
        ("opt nets.py:block --verify-each=all", "--verify-each"),
        ("opt nets.py:block --passes dce,csee", "'--passes': pipeline, column 5: no pass is called 'csee'; did you mean 'cse'?"),
        ("opt nets.py:block --passes partition,cse", "pass 'cse' stands after 'partition'"),
        ("opt nets.py:block --passes dce,reorder-backward", "works on forward and backward, and nothing before it"),
        ("opt nets.py:block --passes dce --budget 0.2", "'--budget' is for the default pipeline"),
        ("repro nowhere", "Directory 'nowhere' does not exist"),
        ("reduce nets.py", "a JOINT needs a --test"),
        ("reduce nets.py --test false", "has no {}"),
        ("reduce nets.py --test 'false {}' -o nowhere/x", "there is no folder"),
        ("reduce ../missing.joint --test 'false {}'", "'../missing.joint' does not exist"),
        ("diff nets.py missing.json", "'missing.json' does not exist"),
    ],
)  # fmt: skip
def test_options_are_refused_before_the_model_is_imported(
    line: str, says: str, folder: Path
) -> None:
    before = {path.name for path in folder.iterdir()}
    refuse(line, says)
    assert "nets" not in sys.modules
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan no_such_module.x:f", "there is no module 'no_such_module'"),
        ("plan nets.py:blok", "did you mean 'block'?"),
        ("plan nets.py:SEVEN", "'SEVEN' is of type int"),
        ("plan nets.py:block a=1", "'a=1' is for hf:TYPE only"),
        ("plan nets.py:block --seq 3", "--seq is for hf:TYPE only"),
        ("plan nets.py:block --batch 3", "takes no batch"),
        ("plan hf:lama", "did you mean 'hf:llama'?"),
        ("plan hf:clap", "file.py:function"),
        ("plan hf:llama hidden_sise=64", "did you mean 'hidden_size'?"),
        ("plan hf:llama num_hidden_layers=many", "refuses num_hidden_layers=many"),
        ("plan hf:llama 64", "expected key=value"),
        ("plan hf:vit --seq 64", "--seq has no meaning for hf:vit"),
        ("fit nets.py:block --memory 1GiB --optimizer adamv", "did you mean 'adam'"),
        ("fit nets.py:block --memory 1GiB --optimizer lbfgs", "cannot be traced"),
        ("plan nets.py:block --budget 0.5 --offload 1GB/s", "expected a budget on the peak"),
        ("fit nets.py:block --memory 1MiB --ranks 2 --offload 25GB/s", "value for '--offload'"),
    ],
)
def test_models_and_options_that_do_not_go_together_are_refused(line: str, says: str) -> None:
    refuse(line, says)


def refuse(line: str, says: str) -> None:
    done = run(*shlex.split(line))
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
