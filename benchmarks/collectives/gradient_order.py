"""What the order of gradients gains: steps in backward order and by priority, on a thin network.

``python benchmarks/collectives/gradient_order.py [--json FILE] [--models NAME,...]`` (needs root
and ``iproute2``). Four data-parallel ranks are processes in network namespaces with shaped links;
compute takes the time that it is modelled with (``benchmarks/regret/device.py``), messages are
real. Each plan's steps run one after the other, as in training, and their mean is compared with
the step that was predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "regret"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import links
import torch
import torch.distributed as dist
from all_reduces import measure_latency, with_links
from clusters import BYTES_PER_SECOND, CLUSTERS, FLOPS_PER_SECOND, NUM_RANKS
from device import EmulatedDevice
from ranks import Job, _Work, on_ranks

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps
from autoparallel.planning.capture import capture_target
from autoparallel.planning.objectives import plan_for
from autoparallel.planning.plan import priced, request_of
from autoparallel.runtime.messages.all_reduces import AllReduces
from autoparallel.target.load import load_target

NETWORK = "flat slow"
EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS: dict[str, Job] = {
    "GPT, 8 equal layers": (
        str(EXAMPLES / "gpt.py"),
        {"n_layer": 8, "d_model": 192, "n_head": 4, "seq": 128, "vocab": 256},
        16,
        128,
    ),
    "GPT, large embedding": (
        str(EXAMPLES / "gpt.py"),
        {"n_layer": 4, "d_model": 128, "n_head": 4, "seq": 128, "vocab": 8192},
        16,
        128,
    ),
    "AlexNet, large classifier": (
        str(EXAMPLES / "alexnet.py"),
        {"width": 0.25, "hidden": 1024, "classes": 1000},
        128,
        None,
    ),
}
ORDERS = ("backward", "priority")
WARMUP, STEPS = 2, 4


@dataclass(frozen=True)
class Row:
    """A model's step in one order. ``parts``: how many sums it has."""

    model: str
    order: str
    parts: int
    predicted: float
    measured: float
    is_chosen: bool


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    emulated = next(each for each in CLUSTERS if each.name == NETWORK)
    rows: list[Row] = []
    with links.network(NUM_RANKS, emulated.mbit, emulated.uplinks) as places:
        cluster = with_links(emulated.cluster(), *on_ranks(places, measure_latency))
        for model, job in MODELS.items():
            if not options.models or any(part in model for part in options.models.split(",")):
                rows += compared(model, job, cluster, places)
    print("| model | order | sums | predicted | measured | chosen |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.model} | {row.order} | {row.parts} | {row.predicted:.3f} s "
            f"| {row.measured:.3f} s | {'yes' if row.is_chosen else ''} |"
        )
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    return 0


def compared(model: str, job: Job, cluster: Cluster, places: Any) -> list[Row]:
    """A model's steps in both orders; the planner is asked which one it chooses."""
    plans = {order: make_plan(job, cluster, f",gradients={order}") for order in ORDERS}
    chosen = make_plan(job, cluster, "").gradient_order
    found = []
    for order, plan in plans.items():
        seconds = on_ranks(places, measure_steps, job, dumps(plan))
        (stage,) = plan.stages
        found.append(
            Row(
                model,
                order,
                len(stage.gradient_sums),
                plan.prediction.step_seconds,
                seconds,
                order == chosen,
            )
        )
        print(found[-1], file=sys.stderr, flush=True)
    return found


def make_plan(job: Job, cluster: Cluster, more: str) -> Plan:
    name, settings, global_batch, seq = job
    target = load_target(name, settings)
    forced = parse_parallel(f"dp={NUM_RANKS},zero=0,microbatches=1,recompute=none{more}")
    options = PlanOptions(global_batch=global_batch, seq=seq, forced=forced, profile="analytic")
    program = capture_target(target, options)
    graph, _ = priced(program, target, cluster, options)
    return plan_for(graph, program.blocks, cluster, request_of(program, target, options))


def measure_steps(rank: int, job: Job, plan: str) -> float:
    """Seconds of a step among several, the slowest rank's."""
    device = EmulatedDevice(FLOPS_PER_SECOND, BYTES_PER_SECOND)
    start_sum = AllReduces.start

    def start_when_computed(self: AllReduces, *arguments: Any) -> Any:
        device.synchronize()  # a sum begins when the device has made its gradients
        return start_sum(self, *arguments)

    AllReduces.start = start_when_computed  # type: ignore[method-assign]
    work = _Work.of(job)
    trainer = work.trainer(plan)
    trainer.overlaps_steps = True
    trainer.use_optimizer(None)
    times = []
    with device:
        for _ in range(WARMUP + STEPS):
            trainer.step(work.batch)
            device.synchronize()
            times.append(time.monotonic())
        trainer.settle()
    spent = torch.tensor((times[-1] - times[WARMUP - 1]) / STEPS, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
