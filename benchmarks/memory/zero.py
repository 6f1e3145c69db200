"""What data parallelism holds and sends under each ZeRO stage, predicted and measured.

``python benchmarks/memory/zero.py [--ranks 2 4] [--write docs/zero.md]`` (needs root and
``iproute2``). A GPT is trained under ZeRO 0 to 3 on gloo processes, each in a network namespace of
its own. Counted are the bytes of parameters, gradients and optimizer states as the last backward
of a step begins (``runtime.memory_counter``), and the bytes that each rank's interface sends in a
step. Both are given per parameter, beside the closed forms: Rajbhandari et al. 2020, "ZeRO",
figure 1 and section 7.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("benchmarks/regret", "benchmarks/pipelines", ""):
    sys.path.insert(0, str(ROOT / folder))

import links
import torch
import torch.distributed as dist
from ranks import on_ranks

from autoparallel.cost_model.memory import policy, state_bytes
from autoparallel.cost_model.resolve import parse_cluster
from autoparallel.options import parse_parallel
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning import PlanOptions, capture_target, plan_program, record_target
from autoparallel.runtime.memory_counter import states_before_last_backward
from autoparallel.runtime.trainer import Trainer
from autoparallel.targets import Target, load_target

MODEL = (str(ROOT / "examples" / "gpt.py"), {"n_layer": 4, "d_model": 256, "n_head": 4, "seq": 16})
MICROBATCHES = 4
STEPS = 3
MBIT = 10_000
CPU = torch.device("cpu")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True, slots=True)
class Measured:
    """Per rank: bytes of states by category, and the bytes sent in each step."""

    states: dict[str, int]
    sent: list[int]


def bytes_sent(interface: str = "e0") -> int:
    """What an interface of this process's namespace has sent so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"no interface {interface}")


def measure(rank: int, target: Target, program: Program, plans: Sequence[str]) -> list[Any]:
    """On a rank: what each plan's states take, and what its steps send; of all ranks on rank 0."""
    found = []
    for text in plans:
        plan = loads(text)
        trainer = Trainer(program, plan, record_target(target), device=CPU)
        batch = random_batch(program.graph.with_batch_size(plan.model.global_batch), seed=0)
        for _ in range(5):  # batches are compared over the ranks in the first four
            trainer.step(batch)
        sent = []
        for _ in range(STEPS):
            dist.barrier()
            before = bytes_sent()
            trainer.step(batch)
            sent.append(bytes_sent() - before)
        own = Measured(states_before_last_backward(trainer, batch), sent)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, asdict(own))
        found.append(every)
    return found


if __name__ == "__main__":
    target = load_target(*MODEL)
    for ranks in (2, 4):
        for precision in ("bf16", "fp32"):
            opts = [PlanOptions(global_batch=MICROBATCHES * ranks, seq=16, precision=precision,
                forced=parse_parallel(f"dp={ranks},zero={z},microbatches={MICROBATCHES}")) for z in range(4)]
            program = capture_target(target, opts[0])
            plans = [plan_program(program, target, parse_cluster(f"cpu:{ranks}"), o) for o in opts]
            with links.network(ranks, MBIT) as places:
                found = on_ranks(places, measure, target, program, [dumps(p) for p in plans])
            psi = plans[0].model.num_parameters
            for z, each in enumerate(found):
                p = policy(precision)
                st = state_bytes(psi, p, z, ranks)
                print(ranks, precision, z, {k: round(v/psi,3) for k, v in each[0]["states"].items()},
                  "total", round(sum(each[0]["states"].values())/psi, 3), "pred", st.total/psi,
                  "sent", [round(sorted(e["sent"])[1]/psi, 3) for e in each], flush=True)
