"""Joint graphs in files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import remat
from remat.errors import ProblemError, RematError
from remat.graph.text import parse_joint, print_joint, read_joint, write_joint
from remat.graph.text.syntax import MAX_BYTES
from tests.graph.text.steps import captured

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_a_file_holds_the_text_and_a_plan_fits_its_graph(tmp_path: Path) -> None:
    joint, path = captured("several"), tmp_path / "several.joint"
    write_joint(path, joint)
    assert path.read_text() == print_joint(joint)
    plan = remat.plan(read_joint(str(path)), 0)
    assert remat.plan(joint, plan=remat.Plan.from_json(plan.to_json())).saved == plan.saved


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "it is no text in UTF-8: byte 0"),
        (
            b"joint(",
            "graph text, line 1, column 6: what is no Python syntax ('(' was never closed)",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "bad.joint"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProblemError) as caught:
        read_joint(path)
    assert str(caught.value).startswith(f"joint graph '{path}' cannot be read: {says}")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RematError, match="cannot be written"):
        write_joint(tmp_path / "missing" / "x.joint", captured("mlp"))


def test_what_is_too_large_is_neither_written_nor_read(tmp_path: Path) -> None:
    path = tmp_path / "large.joint"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ProblemError, match=f"larger than the {MAX_BYTES} bytes that are read"):
        read_joint(path)
    named = replace(captured("mlp"), name="x" * MAX_BYTES)
    with pytest.raises(ProblemError, match=r"text of \d+ characters is too large"):
        write_joint(path, named)
    assert path.stat().st_size == MAX_BYTES + 1


OTHER_PROCESS = """
import json, sys
import remat
remat.capture
assert not [m for m in sys.modules if "graph.text" in m], "imported before it is asked for"
from remat.graph.text import parse_joint, print_joint
texts = json.load(sys.stdin)
joints = [parse_joint(text) for text in texts]
assert [print_joint(joint) for joint in joints] == texts
print(json.dumps([joint.fingerprint for joint in joints]))
"""


#: Inductor draws random numbers by operators of its own.
SEEDS = """\
joint("seeds", version=1, device="cpu", lower="inductor", num_fwd_outputs=1)

part("is_forward")
seeds: i64[2] = prims.inductor_seeds.default(2, torch.device("cpu"))
seed: i64 = prims.inductor_lookup_seed.default(seeds, 0)
draw: f32[4] = prims.inductor_random.default([4], seed, "rand")
return [
    forward(draw),
]
"""


def test_another_process_reads_the_same_graphs() -> None:
    """Operators that nothing there has imported yet are found; fingerprints agree."""
    plan = remat.plan(captured("dropout"), 0)
    half = remat.JointGraph(graph_module=plan.forward, num_fwd_outputs=1, name="forward")
    graphs = [captured("branches"), half, parse_joint(SEEDS)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OTHER_PROCESS],
        input=json.dumps([print_joint(graph) for graph in graphs]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [graph.fingerprint for graph in graphs]
