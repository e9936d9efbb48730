"""Policies by module: what they do to a plan, and what is refused."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import remat
from remat.errors import BudgetError, PlanError, ProblemError
from remat.graph import ops
from remat.graph.branch_values import fix_branches
from remat.graph.index import index_graph
from remat.graph.joint import output_node
from remat.graph.memory.liveness import own_outputs
from remat.graph.memory.storages import storage_key
from remat.graph.problems.replays import Replays, maker_of
from remat.graph.roles import classify
from remat.graph.text import parse_joint, print_joint
from remat.integrations.partitioner import Partitioner
from remat.planning.request import PlanRequest
from remat.solvers.graph.problem import evaluate
from remat.units import parse_bytes
from tests.fuzz.functions import counter
from tests.graphs import joint_of, weight

LOWERINGS = ("eager", "inductor")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.softmax(self.attn(x), dim=-1).sin()
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@functools.cache
def net(lower: str = "eager", blocks: int = 2) -> remat.JointGraph:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return remat.capture(Net(blocks), (torch.randn(16, 32),), lower=lower)


# Whether a policy holds, read off the finished graphs -------------------------------------------------


def modules_of(node: fx.Node) -> list[str]:
    """Names of the modules around a node, the outermost first, as `named_modules` has them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = re.sub(r"^[LG]\['\w+'\]\.?", "", [*stack.values()][-1][0]) if stack else ""
    parts = path.split(".") if path else []
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def region_of(node: fx.Node, pattern: str) -> str | None:
    """The outermost module around a node that a pattern matches."""
    glob = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return next((name for name in modules_of(node) if glob.fullmatch(name)), None)


def storage(node: fx.Node) -> object:
    key = storage_key(node.meta.get("val"))
    return node if key is None else key


def saved_owners(plan: remat.Plan) -> Iterator[fx.Node]:
    """The nodes of forward that make what it hands to backward, beyond inputs and outputs."""
    forward = plan.forward
    makers: dict[object, fx.Node] = {}
    for node in forward.graph.nodes:
        if node.op != "output":
            makers.setdefault(storage(node), node)
    values: Any = output_node(forward.graph).args[0]
    own = {storage(v) for v in values[: own_outputs(forward)] if isinstance(v, fx.Node)}
    for value in values[own_outputs(forward) :]:
        if isinstance(value, fx.Node) and storage(value) not in own:
            maker = makers[storage(value)]
            if maker.op == "call_function" and isinstance(maker.meta.get("val"), torch.Tensor):
                yield maker


def bytes_inside(plan: remat.Plan, name: str) -> int:
    """Bytes that are saved of the values that a module makes."""
    inside = [n for n in saved_owners(plan) if name in modules_of(n)]
    return sum(n.meta["val"].untyped_storage().nbytes() for n in inside)


def saved_inside(plan: remat.Plan, pattern: str) -> list[str]:
    """What is saved of the matched modules although only the module itself reads it in forward."""
    found = []
    for maker in saved_owners(plan):
        region = region_of(maker, pattern)
        if region is None or maker.name.endswith("_state"):  # of a generator, for its replay
            continue
        looking = [n for n in plan.forward.graph.nodes if storage(n) == storage(maker)]
        readers = [u for n in looking for u in n.users if u.op != "output"]
        if all(region in modules_of(u) for u in readers):
            found.append(maker.name)
    return found


def cannot_run_again(joint: remat.JointGraph, names: list[str]) -> list[str]:
    """Of some nodes, those whose operators must run once."""
    replays, index = Replays(joint.graph.nodes), index_graph(joint.graph)
    kept = fix_branches(index, classify(joint, index))
    return [
        n
        for n in names
        if replays.forbid(node := index.nodes[index.by_name[n]])
        or ops.is_opaque(maker_of(node))
        or index.by_name[n] in kept
    ]


def run_again(plan: remat.Plan, pattern: str) -> set[str]:
    """Operators of the matched modules that run again, without views and elements of tuples."""
    nodes = {n.name: n for n in plan.forward.graph.nodes}
    return {
        name
        for name in plan.recomputed
        if name in nodes
        and region_of(nodes[name], pattern)
        and not ops.default_taxonomy().is_view(nodes[name])
        # A view whose schema names no alias; PyTorch 2.15 makes one of each linear layer.
        and nodes[name].target is not torch.ops.aten._unsafe_view.default
    }


def run_again_at_budget_1(joint: remat.JointGraph, pattern: str) -> set[str]:
    """The same of the minimum cut without a budget, without policies."""
    pipeline = "dce,cse,cleanup-recompute-tags,min-cut,partition,functionalize-rng"
    return run_again(remat.plan(joint, pipeline=pipeline), pattern)


def assert_holds(joint: remat.JointGraph, plan: remat.Plan, policies: Mapping[str, str]) -> None:
    for pattern, policy in policies.items():
        if policy == "recompute":
            inside = saved_inside(plan, pattern)
            assert inside == cannot_run_again(joint, inside), pattern
        else:
            assert run_again(plan, pattern) <= run_again_at_budget_1(joint, pattern), pattern


# Plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.2, "peak:0.3"])
@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize(
    "policies",
    [
        {"*.attn": "save", "*.mlp": "recompute"},
        {"layers.0": "recompute", "layers.1": "save"},
    ],
    ids=str,
)
def test_a_policy_holds_at_every_budget(
    policies: Mapping[str, str], lower: str, budget: Any
) -> None:
    joint = net(lower)
    plan = remat.plan(joint, budget, policies=policies)
    assert_holds(joint, plan, policies)


def test_these_policies_say_something() -> None:
    """Without them neither holds: what the assertions look at is there."""
    joint = net()
    assert saved_inside(remat.plan(joint), "*.mlp")
    assert run_again(remat.plan(joint, 0.0), "*.mlp") > run_again_at_budget_1(joint, "*.mlp")


def test_saving_forces_nothing_that_backward_does_not_read() -> None:
    """Budget 1 saves what it did: the values in a module that backward never reads are not among it."""
    for lower in LOWERINGS:
        joint = net(lower)
        free, kept = remat.plan(joint), remat.plan(joint, policies={"*": "save"})
        assert kept.saved_bytes <= free.full_bytes
        read = {n.name for n in kept.backward.graph.nodes if n.op == "placeholder" and n.users}
        assert {owner.name for owner in saved_owners(kept)} <= read | set(kept.saved)


def test_recomputing_layers_saves_their_inputs_only() -> None:
    joint = net(blocks=4)
    plan = remat.plan(joint, policies={"layers.*": "recompute"})
    of_layers = [n for n in saved_owners(plan) if region_of(n, "layers.*")]
    assert [modules_of(n)[-1] for n in of_layers] == [f"layers.{k}" for k in range(4)]
    assert not saved_inside(plan, "layers.*")


def test_a_later_pattern_counts_before_an_earlier_one() -> None:
    joint = net()
    policies = {"layers.*": "recompute", "*.attn": "save"}
    plan = remat.plan(joint, policies=policies)
    assert run_again(plan, "*.attn") <= run_again_at_budget_1(joint, "*.attn")
    assert not saved_inside(plan, "*.mlp")
    other = remat.plan(joint, policies=dict(reversed(policies.items())))
    assert run_again(other, "*.attn") > run_again_at_budget_1(joint, "*.attn")


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        *itertools.product(("save", "recompute"), (1, 0.6, 0.3)),
        # Where the bytes of the whole step bind as well, a budget of a module is no longer the least in cost.
        *itertools.product(("saved:0B", "saved:256B", "saved:600B"), (remat.Saved("1GiB"),)),
    ],
)
def test_no_decision_that_keeps_to_a_policy_costs_less(policy: str, budget: Any) -> None:
    """By brute force over all decisions of a small step, each of which is checked by the names of modules."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GELU(), nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.b(self.a(x).exp()).sin() * self.a(x.cos())).sum()

    joint = joint_of(Small(), weight(64))
    plan = remat.plan(joint, budget, policies={"a": policy})
    problem = remat.instance(joint).problem
    nodes = {n.name: n for n in joint.graph.nodes}
    inside = {k for k, name in enumerate(problem.names) if "a" in modules_of(nodes[name])}
    results = {
        k for k in inside for u in nodes[problem.names[k]].users
        if not modules_of(u) and u.meta.get("partitioner_tag") == "is_forward"
    }  # fmt: skip
    free_again = run_again_at_budget_1(joint, "a")
    choices = [k for k, size in enumerate(problem.size) if size and problem.savable[k]]
    costs = []
    for n in range(len(choices) + 1):
        for saved in itertools.combinations(choices, n):
            done = evaluate(
                problem,
                [*saved, *(k for k, s in enumerate(problem.size) if problem.savable[k] and not s)],
            )
            again = {problem.names[k] for k in done.recomputed if k in inside}
            kept = set(done.saved) & inside & set(choices)
            if policy == "recompute":
                held = not kept - results
            elif policy == "save":
                held = again <= free_again
            else:
                held = sum(problem.size[k] for k in kept) <= parse_bytes(policy[6:])
            if held and done.saved_bytes <= plan.capacity:
                costs.append(done.recompute_cost)
    assert plan.recompute_cost == min(costs)


def test_random_operators_replay_and_undeclared_ones_run_once() -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return counter(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), Counting(), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x).sum()

    joint = joint_of(Model(), torch.randn(16, 8))
    plan = remat.plan(joint, 0, policies={"mlp": "recompute"})
    inside = saved_inside(plan, "mlp")
    assert inside == cannot_run_again(joint, inside) != []
    assert any("dropout" in name or "bernoulli" in name for name in plan.recomputed)


@pytest.mark.parametrize("lower", LOWERINGS)
def test_a_policy_holds_where_operators_make_tuples(lower: str) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x.sin(), x.cos())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + norm(layer(x).exp())
            return x.sum()

    torch._dynamo.reset()
    joint = remat.capture(Model(), (torch.randn(4, 2, 64, 16, requires_grad=True),), lower=lower)
    for policies in ({"*": "save"}, {"layers.*": "recompute"}, {"norms.*": "recompute"}):
        for budget in (0, "peak:0.3"):
            assert_holds(joint, remat.plan(joint, budget, policies=policies), policies)
    for nbytes in (0, 40_000):
        policies = {"layers.*": f"saved:{nbytes}B", "norms.*": f"saved:{nbytes}B"}
        plan = remat.plan(joint, "peak:0.3", policies=policies)
        inside = [f"{p}.{k}" for p in ("layers", "norms") for k in range(2)]
        assert max(bytes_inside(plan, name) for name in inside) <= nbytes


def test_what_the_model_returns_is_not_made_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).exp()  # backward reads it

    joint = joint_of(Model(), torch.randn(16, 32))
    assert not remat.plan(joint, policies={"head": "recompute"}).recompute_cost


# Budgets of modules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 0.5, "peak:0.5"])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_a_module_saves_no_more_than_its_budget(lower: str, budget: Any) -> None:
    joint, costs = net(lower), []
    for nbytes in (0, 1024, 5000, 20_000):
        plan = remat.plan(joint, budget, policies={"layers.*": {"budget": remat.Saved(nbytes)}})
        assert max(bytes_inside(plan, name) for name in ("layers.0", "layers.1")) <= nbytes
        costs.append(plan.recompute_cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    again = remat.plan(joint, plan=plan.to_json())
    assert (again.saved, again.policies) == (plan.saved, plan.policies)


@pytest.mark.parametrize("budget", [1, 0.6, 0.2])
def test_a_budget_of_a_module_that_does_not_bind_changes_nothing(budget: Any) -> None:
    joint = net("inductor")
    free = remat.plan(joint, budget)
    used = {f"layers.{k}": bytes_inside(free, f"layers.{k}") for k in range(2)}
    policies = {name: {"budget": remat.Saved(nbytes)} for name, nbytes in used.items()}
    assert remat.plan(joint, budget, policies=policies).saved == free.saved
    # Less room in one of them alone.
    policies["layers.1"] = {"budget": remat.Saved(max(0, used["layers.1"] - 1))}
    less = remat.plan(joint, budget, policies=policies)
    assert all(bytes_inside(less, name) <= nbytes for name, nbytes in used.items())


def test_budgets_of_modules_hold_all_over_a_frontier() -> None:
    for by in ("saved", "peak"):
        frontier = remat.frontier(net(), by=by, policies={"layers.*": "saved:6KiB"})
        for point in frontier.points:
            plan = frontier.plan(point)
            assert max(bytes_inside(plan, f"layers.{k}") for k in range(2)) <= 6 * 1024


def test_a_budget_below_what_other_policies_save_names_both_parts() -> None:
    policies = {"layers.0": {"budget": remat.Saved("1KiB")}, "*.mlp": "save"}
    with pytest.raises(
        BudgetError,
        match=r"'layers.0=saved:1024B' leaves 'layers.0' 1 KiB, but at least [\d.]+ KiB",
    ):
        remat.plan(net(), policies=policies)
    # Where the module's own pattern comes last, it is for all that is in the module.
    assert remat.plan(net(), policies=dict(reversed(policies.items()))).saved_bytes


# Offloading -------------------------------------------------------------------------------------------


def test_offloaded_modules() -> None:
    joint = net("inductor")
    plan = remat.plan(joint, "peak:1", offload="nvlink-c2c", policies={"*.mlp": "offload"})
    nodes = {n.name: n for n in joint.graph.nodes}
    offloaded = {region_of(nodes[n], "*.mlp") for n in plan.offloaded}
    assert {"layers.0.mlp", "layers.1.mlp"} <= offloaded
    assert "*.mlp=offload" in plan.explain()
    without_link = remat.plan(net(), policies={"*.mlp": "offload"})
    assert without_link.offloads
    assert without_link.link == "pcie4 (32 GB/s)"


# What is refused --------------------------------------------------------------------------------------


def test_a_pattern_without_a_module_names_the_nearest() -> None:
    with pytest.raises(
        PlanError, match=r"'\*\.mpl' match no module of 'Net'; the nearest are layers.0.mlp, l"
    ):
        remat.plan(net(), policies={"*.mpl": "save"})
    with pytest.raises(
        PlanError, match=r"'encoder.\*' match no module .* nearest are layers, layers.0, "
    ):
        remat.plan(net(), policies={"encoder.*": "save"})
    with pytest.raises(PlanError, match="PyTorch recorded no module"):
        remat.plan(
            remat.capture(lambda x: x.sin().sum(), (torch.randn(4, requires_grad=True),)),
            policies={"mlp": "save"},
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"*.mlp": "keep"}, "policy '*.mlp' is 'keep'; expected 'save'"),
        ({"*.mlp": 0.5}, "policy '*.mlp' is 0.5"),
        (
            {"*.mlp": {"budget": "1GiB"}},
            "expected 'save', 'recompute', 'offload', or a budget of saved bytes",
        ),
        ({3: "save"}, "the pattern 3 of policies is no name"),
        ({"": "save"}, "the pattern '' of policies"),
        (7, "policies is 7; expected a dict"),
        (["save"], "the pattern '' of policies"),
    ],
)
def test_what_is_no_policy_is_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(said)) as raised:
        remat.backend(policies=given)
    assert raised.value.option == "policies"


def test_a_tag_of_the_users_that_contradicts_is_named() -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x).sum()

    joint = joint_of(Checkpointed(), torch.randn(16, 32))
    with pytest.raises(
        PlanError, match=r"'\*\.attn=save' contradicts the tag \w+_RECOMPUTE .*layers.0.attn"
    ):
        remat.plan(joint, policies={"*.attn": "save"})
    assert remat.plan(joint, policies={"*.attn": "recompute"}).saved_bytes
    tagged = net().copy()
    inner = next(n for n in tagged.graph.nodes if "layers.0.mlp.1" in modules_of(n))
    inner.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with pytest.raises(
        PlanError, match=rf"recompute' contradicts the tag MUST_SAVE .*'{inner.name}'"
    ):
        remat.plan(tagged, policies={"*.mlp": "recompute"})


def test_a_budget_that_policies_leave_no_plan_within_names_them() -> None:
    policies = {"*.mlp": "save"}
    with pytest.raises(
        BudgetError, match=r"values are tagged policy '\*\.mlp=save'; raise the budget"
    ):
        remat.plan(net(), remat.Saved(64), policies=policies)
    with pytest.raises(BudgetError, match=r'All plans follow the policies \{"\*\.mlp": "save"\}'):
        remat.plan(net(), remat.Peak(1000), policies=policies)
    with pytest.raises(ProblemError, match="policies given beside a pipeline"):
        remat.plan(net(), pipeline="dce,min-cut,partition", policies=policies)


# Saved plans, texts, several graphs -------------------------------------------------------------------


def test_a_saved_plan_carries_its_policies() -> None:
    joint, policies = net(), {"layers.*": "recompute", "*.attn": "save"}
    plan = remat.plan(joint, 0.5, policies=policies)
    again = remat.plan(joint, plan=plan.to_json())
    assert again.policies == plan.policies == '{"layers.*": "recompute", "*.attn": "save"}'
    assert (again.saved, again.recomputed) == (plan.saved, plan.recomputed)
    assert remat.plan(joint, plan=plan, policies=policies).saved == plan.saved
    with pytest.raises(PlanError, match=r"was made under the policies .* are given; plan again"):
        remat.plan(joint, plan=plan, policies={"*.attn": "save"})


def test_keys_of_caches_tell_policies_apart() -> None:
    one, other, none = (
        Partitioner(policies=p) for p in ({"*.mlp": "save"}, {"*.mlp": "recompute"}, None)
    )
    assert len({one.uuid(), other.uuid(), none.uuid()}) == 3
    assert one.uuid() == Partitioner(policies={"*.mlp": "save"}).uuid()
    assert one.agree is not None
    assert '{"*.mlp": "save"}' in one.agree.options


def test_options_as_text() -> None:
    request = PlanRequest.of(policies={"*.mlp": "save", "head": "recompute"})
    assert PlanRequest.of(**request.to_options()).policies == request.policies
    assert PlanRequest.of(policies=("*.mlp=save", "head=recompute")).policies == request.policies
    twice = PlanRequest.of(policies=("a=save", "b=save", "a=recompute")).policies
    assert str(twice) == '{"b": "save", "a": "recompute"}'


def test_a_graph_as_text_keeps_the_names_of_modules() -> None:
    joint = net("inductor")
    text = print_joint(joint, modules=True)
    read = parse_joint(text)
    assert print_joint(read, modules=True) == text
    policies = {"*.attn": "save", "*.mlp": "recompute"}
    assert remat.plan(read, policies=policies).saved == remat.plan(joint, policies=policies).saved


def test_every_entry_point_takes_policies() -> None:
    joint, policies = net(), {"*.mlp": "recompute"}
    frontier = remat.frontier(joint, policies=policies)
    assert max(p.saved_bytes for p in frontier.points) < remat.plan(joint).saved_bytes
    assert frontier.plan(frontier.points[-1]).policies
    row = remat.compare(joint, "greedy", 1, policies=policies).rows[0]
    assert (
        row.recompute_cost == remat.plan(joint, solver="greedy", policies=policies).recompute_cost
    )
    made = remat.fit(Net(), (torch.randn(4, 32),), memory="1GiB", batches=4, policies=policies)
    assert '"policies": {"*.mlp": "recompute"}' in str(made)


def test_patterns_may_match_in_any_graph_of_a_step() -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.head(self.layers[1](x)).sum()

    torch._dynamo.reset()
    joints = remat.capture(Broken(), (torch.randn(16, 32),), lower="eager", fullgraph=False)
    plans = remat.plan(joints, policies={"layers.0.mlp": "recompute", "head": "save"})
    assert not saved_inside(plans.plans[0], "layers.0.mlp")
    assert saved_inside(plans.plans[1], "layers.1.mlp")
    with pytest.raises(PlanError, match="'tail' match no module"):
        remat.plan(joints, policies={"layers.0.mlp": "recompute", "tail": "save"})


# Regions of code --------------------------------------------------------------------------------------


def marked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = (x @ w).sin()
    with remat.region("recompute"):
        x = ((x @ w).cos() @ w).exp()
    x = x.tanh()
    with remat.region("save", "products"):
        x = ((x @ w).cos() @ w).sin()
    return x.sum()


@pytest.mark.parametrize("lower", LOWERINGS)
def test_code_without_a_module_is_marked(lower: str) -> None:
    torch._dynamo.reset()
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in "xw")
    joint = remat.capture(marked, (x, w), lower=lower)
    for read in (joint, parse_joint(print_joint(joint))):
        assert not {"mm_3", "mm_4"} & set(remat.plan(read, 0).recomputed)
        full = remat.plan(read)
        assert not {"mm_1", "cos", "mm_2"} & set(full.saved)
        text = full.explain()
        assert "remat.region('recompute')" in text
        assert "remat.region('save', 'products')" in text
    piped = remat.plan(joint, pipeline="dce,cse,min-cut,partition,functionalize-rng")
    assert not {"mm_1", "cos", "mm_2"} & set(piped.saved)
    assert {"mm_1", "mm_2"} & set(piped.recomputed)
    assert marked(x, w).isfinite(), "eager code runs as it is"
    with pytest.raises(ProblemError, match="region is 'keep'; expected one of 'save'"):
        remat.region("keep")


def test_what_the_code_marks_counts_before_patterns() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with remat.region("recompute"):
                return self.mlp(x.sin()).sum()

    joint = joint_of(Marked(), weight(8, 8))
    assert not saved_inside(remat.plan(joint, policies={"mlp": "save"}), "mlp")


def test_explain_lists_what_each_pattern_matched() -> None:
    plan = remat.plan(
        net(), policies={"*.mlp": "recompute", "layers.1.mlp": "save", "layers.0": "save"}
    )
    rows = [
        line.split("  ") for line in plan.explain().splitlines() if "=" in line and "layers" in line
    ]
    assert len(rows) == 2
    assert re.search(r"'\*\.mlp=recompute' +nothing here that no later pattern", plan.explain())
    assert re.search(r"'layers.1.mlp=save' +1 module, \d+ nodes +[\d.]+ KiB", plan.explain())
