"""How good is the plan? Every configuration of a grid, measured on emulated clusters.

``python benchmarks/regret/run.py [--clusters NAME,...] [--models NAME,...] [--measure PART,...]``
(needs root and ``iproute2``). Ranks are processes in network namespaces with shaped links.
Compute is emulated by sleeping the time that it is modelled with; messages are real and pass
through the project's own executors. For each cluster and model: the links are profiled, a plan is
made, and its step is measured, as is that of every configuration of the grid that can run. After
a change of the model alone ``--measure "the plan"`` measures plans, and predicts the rest again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import links
import torch
from clusters import CLUSTERS, FLAT_FAST, ISLANDS, NUM_RANKS, OF_EIGHT, Emulated
from ranks import (
    Job,
    Measured,
    measure_issue,
    measure_message,
    measure_network,
    measure_plans,
    on_ranks,
)

from autoparallel.cache.database import environment_for
from autoparallel.cost_model.profile.lookup import Profile
from autoparallel.cost_model.profile.records import Transfer
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan_file import dumps
from autoparallel.planner.summary import plan_summary
from autoparallel.planning.capture import capture_target
from autoparallel.planning.objectives import plan_for
from autoparallel.planning.plan import priced, request_of
from autoparallel.target.load import load_target
from benchmarks.regret.page import CHOICE, Row, plot, tables

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
MODELS: dict[str, Job] = {
    "GPT": (
        str(EXAMPLES / "gpt.py"),
        {"n_layer": 4, "d_model": 192, "n_head": 4, "seq": 128},
        32,
        128,
    ),
    "wide MLP": (str(HERE / "wide_mlp.py"), {"num_layers": 8}, 768, None),
    "CNN": (
        str(EXAMPLES / "alexnet.py"),
        {"width": 0.25, "hidden": 1024, "classes": 1000},
        128,
        None,
    ),
    "experts": (
        str(EXAMPLES / "gshard_moe.py"),
        {"n_layer": 2, "d_model": 128, "d_ff": 512, "capacity": 80, "seq": 64},
        64,
        64,
    ),
    "Mixtral": (
        f"hf:{HERE.parents[1] / 'tests' / 'zoo' / 'mixtral'}",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_local_experts": 8,
            "num_attention_heads": 4,
        },
        64,
        256,
    ),
}
EXPERTS = ("experts", "Mixtral")
WEAK = 2
"""Factor of the global batch on eight devices."""
CHAINED = "pp={},microbatches=64,schedule=gpipe"
"""A pipeline in which the host's messages are measured."""
GRID = (
    "dp=4,zero=0,microbatches=1",
    "dp=4,zero=0,microbatches=4",
    "dp=4,zero=1,microbatches=4",
    "dp=4,zero=2,microbatches=4",
    "dp=4,zero=3,microbatches=1",
    "tp=4,microbatches=1",
    "dp=2,tp=2,zero=0,microbatches=1",
    "pp=4,microbatches=8,schedule=1f1b",
    "pp=4,microbatches=8,schedule=zb-h1",
    "dp=2,pp=2,zero=0,microbatches=4,schedule=1f1b",
    "tp=2,pp=2,microbatches=4,schedule=1f1b",
)
EXPERT_GRID = (
    "dp=4,ep=4,zero=1,microbatches=1",
    "dp=4,ep=2,zero=0,microbatches=1",
    "dp=2,tp=2,ep=2,microbatches=1",
    "dp=2,tp=2,ep=4,microbatches=1",
    "dp=2,ep=2,pp=2,microbatches=4,schedule=1f1b",
)
"""More configurations of the models of experts."""
MARK = "<!-- written by run.py -->"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", default="", help="some of them, by parts of their names")
    parser.add_argument("--models", default="")
    parser.add_argument(
        "--measure",
        default="",
        help="measure only configurations whose names contain one of these parts, and those that "
        "were never measured; predict the others again",
    )
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    parser.add_argument(
        "--page", type=Path, help="put the tables into this page and the plot beside it"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for emulated in chosen((*CLUSTERS, *OF_EIGHT), options.clusters, lambda each: each.name):
        jobs = chosen(jobs_of(emulated), options.models, lambda each: each[0])
        with links.network(emulated.num_ranks, emulated.mbit, emulated.uplinks) as places:
            emulated = replace(emulated, issue_seconds=on_ranks(places, measure_issue))
            print(f"{emulated.name}: the host issues an op in {emulated.issue_seconds:.2g} s")
            transfers = on_ranks(places, measure_network, emulated)
            chain = chain_of(emulated.num_ranks)
            pipeline = make_plan(emulated, chain, CHAINED.format(emulated.num_ranks), transfers)
            assert pipeline is not None
            message_seconds = on_ranks(places, measure_message, emulated, chain, pipeline[2])
            emulated = replace(emulated, message_seconds=message_seconds)
            print(f"and sends or receives a message in {message_seconds:.2g} s", flush=True)
            for model, job in jobs:
                name = f"{emulated.name}, {model}"
                known = [Row(**row) for row in found.get(name, ())]
                again = chosen(known, options.measure, lambda row: row.configuration)
                kept = [row for row in known if row not in again]
                rows = measure_model(emulated, model, job, places, transfers, kept)
                found[name] = [asdict(row) for row in rows]
                options.json.write_text(json.dumps(found, indent=1))
                show(rows)
    if options.page:
        results = {name: [Row(**row) for row in rows] for name, rows in found.items()}
        write_page(options.page, results)
    return 0


def chosen(values: Any, names: str, name_of: Any) -> list[Any]:
    """The values whose names contain one of ``names``; all without any."""
    wanted = [name for name in names.split(",") if name]
    return [v for v in values if not wanted or any(name in name_of(v) for name in wanted)]


def chain_of(num_ranks: int) -> Job:
    """The job of the pipeline ``CHAINED``."""
    return str(HERE / "wide_mlp.py"), {"num_layers": num_ranks}, 256, None


def jobs_of(emulated: Emulated) -> list[tuple[str, Job]]:
    """The models of a cluster: all on four devices, but experts of transformers on two clusters;
    on eight devices those with experts, with more samples."""
    every = emulated.num_ranks == NUM_RANKS
    both = emulated in (FLAT_FAST, ISLANDS, *OF_EIGHT)
    more = 1 if every else WEAK
    return [
        (name, (target, settings, more * global_batch, seq))
        for name, (target, settings, global_batch, seq) in MODELS.items()
        if (name in EXPERTS or every) and (both or name != "Mixtral")
    ]


def grid_of(emulated: Emulated, model: str) -> tuple[str, ...]:
    """The configurations beside the plan. On eight devices ``dp`` and ``pp`` without other degrees
    are 8, and ``dp`` beside others is twice as large."""
    grid = (*GRID, *(EXPERT_GRID if model in EXPERTS else ()))
    return grid if emulated.num_ranks == NUM_RANKS else tuple(map(_doubled, grid))


def _doubled(configuration: str) -> str:
    """The configuration on twice as many devices.

    >>> _doubled("dp=2,tp=2,ep=4,microbatches=1"), _doubled("tp=4,microbatches=1")
    ('dp=4,tp=2,ep=4,microbatches=1', 'tp=8,microbatches=1')
    """
    name, value = configuration.split(",")[0].split("=")
    return configuration.replace(f"{name}={value}", f"{name}={2 * int(value)}", 1)


def measure_model(
    emulated: Emulated,
    model: str,
    job: Job,
    places: Any,
    transfers: Sequence[Transfer],
    kept: Sequence[Row],
) -> list[Row]:
    """The choice and the grid of one model on one cluster.

    A row of ``kept`` is not measured again if its plan still has the same summary.
    """
    planned = [
        (configuration, *made)
        for configuration in (CHOICE, *grid_of(emulated, model))
        if (made := make_plan(emulated, job, configuration, transfers)) is not None
    ]
    known = {
        (row.configuration, row.summary): Measured(row.seconds, row.busy_seconds) for row in kept
    }
    new = [(name, summary, text) for name, _, summary, text in planned]
    new = [each for each in new if each[:2] not in known]
    steps = on_ranks(places, measure_plans, emulated, job, [text for *_, text in new])
    known |= {each[:2]: measured for each, measured in zip(new, steps, strict=True)}
    return [
        Row(emulated.name, model, configuration, summary, predicted, *known[configuration, summary])
        for configuration, predicted, summary, _ in planned
    ]


def make_plan(
    emulated: Emulated, job: Job, configuration: str, transfers: Sequence[Transfer]
) -> tuple[float, str, str] | None:
    """Predicted seconds, summary and text of the best plan of a configuration; None for none."""
    name, settings, global_batch, seq = job
    # A sum on a thread of its own would not wait for the emulated device.
    asked = "gradients=backward,allreduce=library"
    if configuration != CHOICE:
        asked += f",{configuration},recompute=none"
    target = load_target(name, settings)
    options = PlanOptions(
        global_batch=global_batch,
        seq=seq,
        forced=parse_parallel(asked),
        profile="analytic",
    )
    cluster = emulated.cluster()
    program = capture_target(target, options)
    graph, _ = priced(program, target, cluster, options)
    flat = replace(cluster, hosts=cluster.hosts[:1] * len(cluster.hosts))
    environment = environment_for(flat)
    assert environment is not None
    profile = Profile(environment, {}, tuple(transfers))
    request = request_of(program, target, options)
    try:
        plan = plan_for(graph, program.blocks, cluster, request, basis=Basis(profile, "auto"))
    except AutoparallelError as error:
        print(f"{configuration}: {error}", file=sys.stderr)
        return None
    return plan.prediction.step_seconds, plan_summary(plan), dumps(plan)


def write_page(page: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """Replaces what follows ``MARK`` in the page, and draws the plot beside it."""
    head, mark, _ = page.read_text().partition(MARK)
    page.write_text("\n".join([f"{head}{mark}", "", *tables(found), ""]))
    page.with_suffix(".svg").write_text(plot(found))


def show(rows: Sequence[Row]) -> None:
    """Prints the rows of a model, the fastest first."""
    best = min(row.measured for row in rows)
    for row in sorted(rows, key=lambda row: row.measured):
        error = row.predicted_seconds / row.measured - 1
        print(
            f"{row.cluster:14s} {row.model:9s} {row.configuration:48s} {row.measured:7.3f} s"
            f" {row.measured / best - 1:+7.1%} predicted {error:+6.1%}"
            f" busy {row.busy_seconds:.3f} s {row.summary}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
