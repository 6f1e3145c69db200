"""Plans with pipelines, run under the rules of NCCL and CUDA and held to one device.

In: a model, a schedule and a number of micro-batches. Out: the comparison, in float64, of two steps
on the ranks of a ``strict`` group with two steps on one device: losses, gradients and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from one_device import build_optimizer, reference_of
from test_verification_branches import slow_wires

from autoparallel.cost_model.cluster import Cluster
from autoparallel.cost_model.resolve import parse_cluster
from autoparallel.options import parse_parallel
from autoparallel.passes.deferred_init import Deferred, record_build
from autoparallel.passes.inputs import random_batch
from autoparallel.passes.program import Program
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning import PlanOptions, capture_model, plan_program
from autoparallel.runtime.compare import Verification
from autoparallel.runtime.trainer import Trainer
from autoparallel.runtime.verify import verify
from autoparallel.targets import Target, load_target

GPT = {"d_model": 16, "n_head": 2, "n_layer": 8, "seq": 8, "vocab": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("examples/gpt.py", GPT),
    "tied": ("examples/gpt.py", {**GPT, "tied": True}),
    "skip": ("tests/models/long_skip.py", {}),
    "u-net": ("examples/unet.py", {"channels": 8, "depth": 2}),
    "encoder-decoder": ("hf:tests/zoo/t5", {}),
    "branches": ("tests/models/three_arms.py", {}),
}
SEQUENCES = {"chain": 8, "tied": 8, "encoder-decoder": 8}
SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved,chunks=2", "interleaved,chunks=4", "bfs,chunks=2",
    "zb-h1", "zb-h1,chunks=2", "zb-h2", "zbv", "dualpipev", "chimera",
    "terapipe,slices=2",
)  # fmt: skip
COUNTS = (1, 4, 16, 64)
ROWS = 64


@dataclass(frozen=True)
class Case:
    """``parallel`` besides the schedule and the micro-batches; ``hosts``: devices of each."""

    model: str
    schedule: str
    count: int
    parallel: str = "pp=2"
    hosts: tuple[int, ...] = ()

    def __str__(self) -> str:
        hosts = " on " + "+".join(map(str, self.hosts)) if self.hosts else ""
        return f"{self.model} {self.forced}{hosts}"

    @property
    def forced(self) -> str:
        return f"{self.parallel},schedule={self.schedule},microbatches={self.count}"

    @property
    def cluster(self) -> Cluster:
        """Hosts of several sizes are so far apart that each is a stage."""
        if self.hosts:
            return slow_wires((1e7,) * len(self.hosts), self.hosts)
        return parse_cluster(f"cpu:{self.num_ranks}")

    @property
    def num_ranks(self) -> int:
        if self.hosts:
            return sum(self.hosts)
        forced = parse_parallel(self.parallel)
        return (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)


@cache
def target(model: str) -> Target:
    path, settings = MODELS[model]
    return load_target(path, settings)


@cache
def captured(model: str, precision: str) -> tuple[Deferred, Program]:
    found = target(model)
    deferred = record_build(found.build_model, seed=0)
    batch = found.example_batch(2, SEQUENCES.get(model))
    return deferred, capture_model(deferred.model, batch, found.loss_fn, precision)


def planned(case: Case) -> str | None:
    """The plan file; None where the model or the schedule cannot have this."""
    _, program = captured(case.model, "fp32")
    forced, seq = parse_parallel(case.forced), SEQUENCES.get(case.model)
    options = PlanOptions(global_batch=ROWS, seq=seq, forced=forced)
    try:
        return dumps(plan_program(program, target(case.model), case.cluster, options))
    except AutoparallelError:
        return None


def run_cases(model: str, texts: Sequence[str]) -> list[Verification]:
    """On a rank: each plan of ``model`` for two steps."""
    deferred, program = captured(model, "fp64")
    graph = program.with_batch_size(ROWS).graph
    batches = [random_batch(graph, seed=step) for step in range(2)]
    reference = cache(lambda: reference_of(target(model), program, batches))
    found = []
    for text in texts:
        plan = loads(text, "test")
        plan = replace(plan, model=replace(plan.model, precision="fp64"))
        cpu = torch.device("cpu")
        trainer = Trainer(program, plan, deferred, device=cpu, build=build_optimizer)
        found.append(verify(trainer, batches, reference))
    return found
