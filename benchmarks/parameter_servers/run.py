"""How much do parameter servers train with a slow worker? Predicted, emulated, and what is learnt.

``python benchmarks/parameter_servers/run.py [--parts throughput,convergence] [--write]`` (needs
root and ``iproute2``). Ranks are processes in network namespaces with shaped links. Throughput:
compute is emulated by sleeping the time that it is modelled with, messages and servers are real,
and the plan's own price is compared with the iterations that workers make. Convergence: a small
classifier is really trained, and workers sleep in each iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
sys.path.insert(0, str(Path(__file__).parents[1] / "regret"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import links
import torch
from clusters import BYTES_PER_SECOND, FLOPS_PER_SECOND, NUM_RANKS, Emulated
from ranks import measure_issue, on_ranks

from autoparallel.cost_model.cluster.cluster import Cluster, Link
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.simulator.server_simulation import ServerTimes
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import dumps
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import plan_program
from autoparallel.target.load import load_target
from autoparallel.target.target import Target
from benchmarks.parameter_servers.emulation import (
    Emulation,
    Training,
    emulate,
    measure_links,
    train,
)
from benchmarks.parameter_servers.page import (
    CHOOSING_SEED,
    Run,
    Throughput,
    best_rates,
    plot,
    tables,
)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
GPT = (str(EXAMPLES / "gpt.py"), {"n_layer": 3, "d_model": 192, "n_head": 4, "seq": 128})
GLOBAL_BATCH, SEQ = 12, 128
SPEEDS = (1.0, 0.5, 1.0, 1.0)
"""Rank 1 computes half as fast as the others."""
ROLES = {
    "3 workers, 1 server": "servers=1,microbatches=3",
    "2 workers, 2 servers": "servers=2,microbatches=2",
    "4 workers, 2 servers beside them": "servers=2,place=beside,microbatches=4",
}
CONSISTENCIES = {
    "bsp": "consistency=bsp",
    "ssp(2)": "consistency=ssp,staleness=2",
    "ssp(5)": "consistency=ssp,staleness=5",
    "asp": "consistency=asp",
}
LINKS_MBIT = (500, 250)
ITERATIONS = 12
"""Of the slowest worker, as many as are simulated."""
TRAIN_BATCH, TRAIN_MBIT = 96, 500
KINDS = ("one slow", "in turns")
SLEEP_SECONDS, SLOWNESS = 0.02, 4.0
TRAIN_SECONDS = 6.0
RATES = (0.2, 0.4, 0.8, 1.6)
SEEDS = (0, 1, 2)
MARK = "<!-- written by run.py -->"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="throughput,convergence")
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    parser.add_argument("--write", action="store_true", help="results, the page and its plot")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for part, measure in (("throughput", measure_throughput), ("convergence", measure_training)):
        if part in options.parts.split(","):
            found[part] = []
            for row in measure():
                found[part].append(asdict(row))
                print(row.line(), flush=True)
                if options.write:
                    options.json.write_text(as_text(found))
    if options.write:
        write_page(HERE / "README.md", found)
    return 0


def as_text(found: Mapping[str, Sequence[Any]]) -> str:
    """The results as JSON, a row on each line."""
    parts = [f'"{part}": [\n' + ",\n".join(map(json.dumps, rows)) for part, rows in found.items()]
    return "{" + "\n],\n".join(parts) + "\n]}\n"


def measure_throughput() -> Iterator[Throughput]:
    """Every consistency with every division of roles on every network."""
    target = load_target(*GPT)
    program = capture_target(target, PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ))
    for mbit in LINKS_MBIT:
        with links.network(NUM_RANKS, mbit) as places:
            issue = on_ranks(places, measure_issue)
            latency, rate = on_ranks(places, measure_links)
            print(f"{mbit} Mbit/s: an op {issue:.2g} s, {latency:.2g} s, {rate / 1e6:.1f} MB/s")
            emulated = Emulated(f"{mbit} Mbit/s", mbit, speeds=SPEEDS, issue_seconds=issue)
            cluster = with_link(emulated.cluster(), Link("measured", latency, rate))
            for roles, asked in ROLES.items():
                for name in ("bsp", "ssp(2)", "asp"):
                    yield measure_one(program, target, cluster, places, (roles, name), asked, mbit)


def with_link(cluster: Cluster, link: Link) -> Cluster:
    hosts = tuple(replace(host, link=link) for host in cluster.hosts)
    return replace(cluster, hosts=hosts, inter_link=link)


def measure_one(
    program: Program,
    target: Target,
    cluster: Cluster,
    places: Any,
    names: tuple[str, str],
    asked: str,
    mbit: int,
) -> Throughput:
    """A plan's price beside what its workers do."""
    roles, consistency = names
    options = PlanOptions(
        global_batch=GLOBAL_BATCH,
        seq=SEQ,
        profile="analytic",
        optimizer="sgd",
        forced=parse_parallel(f"{asked},{CONSISTENCIES[consistency]},recompute=none"),
    )
    plan = plan_program(program, target, cluster, options)
    predicted = plan.prediction.step_seconds
    slow_step = predicted * (2 if consistency == "asp" else 1.1)
    run = Emulation(
        program,
        target,
        dumps(plan),
        tuple(FLOPS_PER_SECOND * s for s in SPEEDS),
        tuple(BYTES_PER_SECOND * s for s in SPEEDS),
        ITERATIONS * slow_step,
    )
    times = on_ranks(places, emulate, run)
    per_second = ServerTimes(tuple(map(tuple, times))).iterations_per_second()
    return Throughput(mbit, roles, consistency, len(times) / predicted, per_second, times)


def measure_training() -> Iterator[Run]:
    """Rates on a seed of their own, then every consistency with its best rate on all seeds."""
    target = load_target(str(HERE / "classifier.py"), {})
    program = capture_target(target, PlanOptions(global_batch=TRAIN_BATCH))
    with links.network(NUM_RANKS, TRAIN_MBIT) as places:
        for kind in KINDS:
            tried = []
            for name in CONSISTENCIES:
                for rate in RATES:
                    row = train_one(program, target, places, (kind, name), rate, CHOOSING_SEED)
                    tried.append(row)
                    yield row
            for name, rate in best_rates(tried).items():
                for seed in SEEDS:
                    yield train_one(program, target, places, (kind, name), rate, seed)


def train_one(
    program: Program, target: Target, places: Any, names: tuple[str, str], rate: float, seed: int
) -> Run:
    """The held-out loss of the first worker's weights, in the time of the run."""
    kind, consistency = names
    asked = f"servers=1,microbatches=3,{CONSISTENCIES[consistency]}"
    options = PlanOptions(
        global_batch=TRAIN_BATCH, forced=parse_parallel(asked), profile="analytic", optimizer="sgd"
    )
    plan = plan_program(program, target, parse_cluster("cpu:4"), options)
    run = Training(
        program,
        target,
        dumps(plan),
        rate,
        seed,
        kind,
        SLEEP_SECONDS,
        SLOWNESS,
        TRAIN_SECONDS,
    )
    times, curve = on_ranks(places, train, run)
    return Run(kind, consistency, rate, seed, [len(each) for each in times], curve)


def write_page(page: Path, found: Any) -> None:
    """Replaces what follows ``MARK`` in the page, and draws the plot beside it."""
    throughput = [Throughput(**row) for row in found.get("throughput", ())]
    runs = [Run(**row) for row in found.get("convergence", ())]
    head, mark, _ = page.read_text().partition(MARK)
    page.write_text("\n".join([f"{head}{mark}", "", *tables(throughput, runs), ""]))
    page.with_suffix(".svg").write_text(plot(runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
