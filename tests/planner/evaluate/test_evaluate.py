"""The node-by-node walk agrees with the solvers, whatever the plan."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from any_tiles import cut_all
from one_stage import plan
from random_suites import seeds
from small_graphs import cluster, mlp, random_graph

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.memory import Offload, StateOptions
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import Basis, CostQueries
from autoparallel.planner.costs.choices import Restriction
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.errors import PlanError
from autoparallel.planner.evaluate.evaluate import Evaluation, Evaluator, evaluate
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.integer_programs.ilp import cost, memory_bytes
from autoparallel.planner.inter_op.inter_op import StageChoice
from autoparallel.planner.intra_op.intra_op import StageAnswer
from autoparallel.planner.kernels.recompute import RECOMPUTE_MODES, is_offloaded
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.candidates import Candidate
from autoparallel.planner.search.report_plan import make_plan
from autoparallel.planner.stage.recompute_policy import (
    POLICY_MODES,
    RecomputePolicy,
    policies,
    uniform_policy,
)
from autoparallel.planner.stage.stage_cost import StageTable
from autoparallel.planner.stage.stage_model import StageModel
from autoparallel.planner.stage.stage_problem import StageOptions, StageProblem
from autoparallel.planner.stage.structure import Run, Structure
from autoparallel.planning.capture import capture_target
from autoparallel.target.load import load_target

MESHES = (Mesh(("dp",), (2,)), Mesh(("tp",), (2,)), Mesh(("dp", "tp"), (2, 2)))


def random_policy(
    run: Run, rng: random.Random, modes: tuple[Recompute, ...] = RECOMPUTE_MODES
) -> RecomputePolicy:
    """Every block of the run recomputed in a way drawn for its class."""
    listed = policies(*run.class_counts, modes)
    return listed[rng.randrange(len(listed))]


def random_stage(
    graph: Graph,
    blocks: Blocks,
    mesh: Mesh,
    rng: random.Random,
    *,
    on: Cluster | None = None,
    restriction: Restriction | None = None,
    modes: Recompute | tuple[Recompute, ...] = RECOMPUTE_MODES,
    offload: Offload = "none",
) -> tuple[Plan, float, float]:
    """A plan of random layouts, ZeRO and recomputation (one of ``modes``, or the mode of every
    block); its objective and bytes by the tables: by the integer program, which leaves out
    waits for offloaded values, unless some may be offloaded."""
    on = on or cluster(4)
    ranks = tuple(range(mesh.size))
    prices = Prices(mesh, on, ranks, "fp32", "adamw", rules, states=StateOptions(offload=offload))
    structure = Structure(graph, blocks)
    model = StageModel(structure, prices, restriction or Restriction(), on.hosts[0].link)
    run = structure.run(0, len(blocks.blocks))
    stage_problem = StageProblem(model, run)
    setting = StageOptions(
        num_microbatches=rng.choice((1, 4)),
        zero=rng.randrange(4) if mesh.axes[0] == "dp" else 0,
        policy=uniform_policy(modes, run.class_counts[0])
        if isinstance(modes, str)
        else random_policy(run, rng, modes),
        limit_bytes=1e12,
    )
    problem = stage_problem.linearized(setting)
    choices = tuple(rng.randrange(len(own)) for own in problem.costs)
    assert problem.memory is not None
    table = StageTable(stage_problem, choices)
    answer = StageAnswer(
        run, table, stage_problem.solution(choices), setting, cost(problem, choices), 0.0
    )
    count = setting.num_microbatches
    whole = Candidate(
        graph.batch_size,
        count,
        "1f1b",
        (StageChoice(0, len(blocks.blocks), 0, mesh.size),),
        ((model, answer),),
        (answer.cost,),
        1.0,
        0.0,
        0.0,
    )
    request = Request(graph.batch_size * count, offload=offload)
    found = make_plan(structure, on, request, whole, [], (0, {}))
    if any(map(is_offloaded, [modes] if isinstance(modes, str) else modes)):
        own = answer.cost
        assert cost(problem, choices) <= own.objective(count) * (1 + 1e-9)
        assert memory_bytes(problem.memory, choices) <= own.total_bytes + 1
        return found, own.objective(count), own.total_bytes
    return found, answer.objective, memory_bytes(problem.memory, choices)


@pytest.mark.parametrize("seed", seeds(6))
def test_random_plans_cost_what_the_tables_say(seed: int) -> None:
    rng = random.Random(seed)
    graph, blocks = mlp(3) if seed % 2 else random_graph(seed, 5, num_blocks=3)
    found, objective, num_bytes = random_stage(graph, blocks, MESHES[seed % 3], rng)
    again = evaluate(graph, blocks, found, found.cluster)
    assert again.objective_seconds[0] == pytest.approx(objective, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(num_bytes, abs=1.0)


@pytest.mark.parametrize("seed", seeds(8))
def test_random_plans_with_offloaded_blocks_cost_what_the_tables_say(seed: int) -> None:
    rng = random.Random(seed)
    graph, blocks = mlp(3) if seed % 2 else random_graph(seed, 5, num_blocks=3)
    modes = POLICY_MODES if seed % 3 else ("none-offloaded",)
    found, objective, num_bytes = random_stage(graph, blocks, MESHES[seed % 3], rng, modes=modes)
    again = evaluate(graph, blocks, found, found.cluster)
    assert again.objective_seconds[0] == pytest.approx(objective, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(num_bytes, abs=1.0)


@pytest.mark.parametrize("offload", ["gradients", "parameters"])
@pytest.mark.parametrize("seed", seeds(8))
def test_random_plans_with_states_in_host_memory_cost_what_the_tables_say(
    seed: int, offload: Offload
) -> None:
    """Their copies compete with those of activations, and take longer than compute or not."""
    rng = random.Random(seed)
    graph, blocks = mlp(3) if seed % 2 else random_graph(seed, 5, num_blocks=3)
    (host,) = cluster(4).hosts
    rate = rng.choice((1e7, 1e8, 1e9))
    device = replace(host.device, kind="cuda", host_link_bytes_per_second=rate)
    found, objective, num_bytes = random_stage(
        graph,
        blocks,
        MESHES[seed % 3],
        rng,
        on=replace(cluster(4), hosts=(replace(host, device=device),)),
        modes=POLICY_MODES,
        offload=offload,
    )
    again = evaluate(graph, blocks, found, found.cluster)
    assert again.objective_seconds[0] == pytest.approx(objective, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(num_bytes, abs=1.0)


@pytest.mark.parametrize("mode", ["full", "attention", "attention-offloaded"])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_with_tiles_cost_what_the_tables_say(
    seed: int, mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_all(monkeypatch.setattr)
    rng, mesh = random.Random(seed), (Mesh(("dp",), (2,)), Mesh(("tp",), (4,)))[seed % 2]
    found, objective, num_bytes = random_stage(*mlp(3, rows=16), mesh, rng, modes=mode)
    again = evaluate(*mlp(3, rows=16), found, found.cluster)
    whole = evaluate(*mlp(3, rows=16), replace(found, tiles=1), found.cluster)
    assert found.tiles > 1
    assert again.objective_seconds[0] == pytest.approx(objective, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(num_bytes, abs=1.0)
    assert again.peak_memory_bytes < whole.peak_memory_bytes


@cache
def experts() -> tuple[Graph, Blocks]:
    """Qwen2-MoE, in which shared experts are computed beside the exchange of tokens."""
    found = capture_target(load_target("hf:tests/zoo/qwen2_moe", {}), PlanOptions(8, 16))
    return found.graph.with_batch_size(8), found.blocks


@pytest.mark.parametrize("seed", seeds(8))
def test_random_plans_of_experts_cost_what_the_tables_say(seed: int) -> None:
    """On devices that compute beside exchanges with experts, whose shared experts' products are not
    rerun where the exchange is."""
    toy = cluster(4)
    device = replace(toy.hosts[0].device, slowdown={"all_to_all": 1.2})
    on = replace(toy, hosts=(replace(toy.hosts[0], device=device),))
    mesh, ep = (Mesh(("ep",), (2,)), 0) if seed % 2 else (Mesh(("dp", "ep"), (2, 2)), 1)
    restriction = Restriction(split_batch=(0,) * ep, split_experts=(ep,))
    found, objective, _ = random_stage(
        *experts(), mesh, random.Random(seed), on=on, restriction=restriction
    )
    again = evaluate(*experts(), found, on)
    assert again.objective_seconds[0] == pytest.approx(objective, rel=1e-9)
    assert again.stages[0].seconds["hidden_exchanges"] > 0


def assert_agrees(found: Plan, again: Evaluation) -> None:
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(found.prediction.peak_memory_bytes, abs=1.0)
    for mine, stage in zip(again.stages, found.stages, strict=True):
        for name, seconds in stage.prediction.seconds.items():
            assert mine.seconds[name] == pytest.approx(seconds, rel=1e-9, abs=1e-15)
        for name, num_bytes in stage.prediction.memory_bytes.items():
            assert mine.memory_bytes[name] == pytest.approx(num_bytes, abs=1.0)


@pytest.mark.parametrize(
    "forced",
    [
        pytest.param(Forced(dp=2, tp=2, zero=3), id="dp=2,tp=2,zero=3"),
        pytest.param(Forced(), marks=pytest.mark.slow, id="free"),
        pytest.param(Forced(tp=2, pp=2), marks=pytest.mark.slow, id="tp=2,pp=2"),
        pytest.param(Forced(pp=4, num_microbatches=8, schedule="gpipe"), id="pp=4,gpipe"),
        pytest.param(Forced(pp=2, recompute="full"), id="pp=2,recompute=full"),
    ],
)
def test_found_plans_are_priced_as_they_were_predicted(forced: Forced) -> None:
    graph, blocks = mlp(3, rows=8, width=64, inner=256)
    found = plan(graph, blocks, cluster(4), Request(8, forced=forced))
    assert_agrees(found, evaluate(graph, blocks, found, found.cluster))


@pytest.mark.slow
def test_a_plan_that_hardly_fits_is_priced_as_it_was_predicted() -> None:
    graph, blocks = mlp(6, rows=256, width=64, inner=256)
    free = plan(graph, blocks, cluster(4), Request(256))
    limit = int(0.5 * free.prediction.peak_memory_bytes)
    tight = plan(graph, blocks, cluster(4), Request(256, memory_limit_bytes=limit))
    assert tight.prediction.peak_memory_bytes <= limit
    assert_agrees(tight, evaluate(graph, blocks, tight, tight.cluster))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_found_plans_with_tiles_are_priced_as_they_were_predicted(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tiles are run where gradients of weights are deferred, or if they are denied."""
    cut_all(monkeypatch.setattr)
    graph, blocks = mlp(3, rows=32, width=64, inner=256)
    forced = Forced(pp=2, recompute="full", num_microbatches=4, schedule=schedule)
    found = plan(graph, blocks, cluster(2), Request(32, forced=forced))
    assert (found.tiles > 1) == (schedule == "1f1b")
    assert_agrees(found, evaluate(graph, blocks, found, found.cluster))
    denied = Features(frozenset({"tiles"}))
    whole = plan(graph, blocks, cluster(2), Request(32, forced=forced, features=denied))
    assert whole.tiles == 1
    assert_agrees(whole, evaluate(graph, blocks, whole, whole.cluster))


def test_a_plan_of_another_model_is_refused() -> None:
    graph, blocks = mlp(2)
    found = plan(graph, blocks, cluster(2), Request(4))
    other, other_blocks = mlp(3)
    with pytest.raises(PlanError):
        evaluate(other, other_blocks, found, found.cluster)
    stripped = replace(found, stages=(replace(found.stages[0], layouts={}),))
    with pytest.raises(PlanError, match="no layout"):
        evaluate(graph, blocks, stripped, found.cluster)


def random_pipeline(seed: int) -> tuple[Graph, Blocks, Plan]:
    """A plan of two stages of random layouts, every block recomputed in a way of its own."""
    rng = random.Random(seed)
    graph, blocks = mlp(6) if seed % 2 else random_graph(seed, 5, num_blocks=4)
    found, _, _ = random_stage(graph, blocks, MESHES[seed % 3], rng)
    stage, half = found.stages[0], len(blocks.blocks) // 2
    decided = tuple(
        replace(block, recompute=rng.choice(("none", "selective", "full")))
        for block in stage.blocks
    )
    size = stage.mesh.size
    stages = (
        replace(stage, blocks=decided[:half]),
        replace(stage, blocks=decided[half:], devices=tuple(range(size, 2 * size))),
    )
    return graph, blocks, replace(found, schedule=rng.choice(("1f1b", "zb-h1")), stages=stages)


@pytest.mark.parametrize("seed", seeds(6))
def test_blocks_that_are_walked_once_cost_what_each_costs_alone(seed: int) -> None:
    """One that records its questions walks every block; one evaluator has many plans."""
    graph, blocks, first = random_pipeline(seed)
    shared = Evaluator(graph, blocks)
    bare = replace(
        first.stages[1],
        blocks=tuple(replace(block, recompute="none") for block in first.stages[1].blocks),
    )
    for each in (first, replace(first, stages=(first.stages[0], bare)), first):
        alone = evaluate(graph, blocks, each, cluster(8), basis=Basis(asked=CostQueries()))
        found = shared.evaluation(each, cluster(8))
        assert found.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12)
        assert found.peak_memory_bytes == alone.peak_memory_bytes
        for mine, own in zip(found.stages, alone.stages, strict=True):
            assert mine.memory_bytes == own.memory_bytes
            assert mine.seconds == pytest.approx(own.seconds, rel=1e-12)
