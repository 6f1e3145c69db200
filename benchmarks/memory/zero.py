"""What data parallelism holds and sends under each ZeRO stage, predicted and measured.

``python benchmarks/memory/zero.py [--ranks 2 4] [--write benchmarks/memory/README.md]`` (needs
root and ``iproute2``). A GPT is trained in bf16 under ZeRO 0 to 3 on gloo processes, each in a
network namespace of its own. Counted are the bytes of parameters, gradients and optimizer states
as the last backward of a step begins (``step_memory``), and the bytes that each
rank's interface sends in a step, headers and acknowledgements included. Source of the formulas:
Rajbhandari et al. 2020, "ZeRO", figure 1 and section 7.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "regret"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import links
import torch
import torch.distributed as dist
from ranks import COMPARED_STEPS, on_ranks
from step_memory import states_before_last_backward

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.memory import GradientDtype, policy, sent_bytes
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_target, record_target
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
SEQ = 16
MODEL = (str(EXAMPLE), {"n_layer": 4, "d_model": 256, "n_head": 4, "seq": SEQ})
MICROBATCHES = 4
STEPS = 3
MBIT = 10_000
ALLOWED = 0.02
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True, slots=True)
class Way:
    """How states are held: an option of planning, and what ``--parallel`` forces."""

    title: str
    gradient_dtype: GradientDtype = "master"
    offload: str = "none"

    def options(self, num_ranks: int, zero: int, num_microbatches: int) -> PlanOptions:
        degrees = f"dp={num_ranks},zero={zero},microbatches={num_microbatches}"
        return PlanOptions(
            global_batch=num_microbatches * num_ranks,
            seq=SEQ,
            precision="bf16",
            gradient_dtype=self.gradient_dtype,
            forced=parse_parallel(f"{degrees},offload={self.offload}"),
        )


WAYS = (
    Way("gradients in float32 (the default)"),
    Way("gradients in bf16 (`--gradient-dtype compute`)", "compute"),
    Way(
        "gradients in bf16, optimizer offloaded (`--parallel offload=optimizer`)",
        "compute",
        "optimizer",
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One ZeRO stage, in bytes per parameter: of states, and sent in a step of one micro-batch and
    of several. ``measured`` are of the rank that is furthest from what was predicted."""

    way: Way
    num_ranks: int
    zero: int
    predicted: tuple[float, float, float]
    measured: tuple[float, float, float]

    @property
    def worst_error(self) -> float:
        pairs = zip(self.measured, self.predicted, strict=True)
        return max(abs(found / expected - 1) for found, expected in pairs)


def bytes_sent(interface: str = "e0") -> int:
    """What an interface of this process's namespace has sent so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"no interface {interface}")


def measure(
    rank: int, target: Target, program: Program, plans: Sequence[str]
) -> list[list[tuple[int, int]]]:
    """For each plan, of every rank: bytes of its states, and the median bytes that a step sends."""
    found = []
    for text in plans:
        plan = loads(text)
        trainer = Trainer(program, plan, record_target(target), device=torch.device("cpu"))
        batch = random_batch(program.graph.with_batch_size(plan.model.global_batch), seed=0)
        for _ in range(COMPARED_STEPS + 1):
            trainer.step(batch)
        sent = []
        for _ in range(STEPS):
            dist.barrier()
            before = bytes_sent()
            trainer.step(batch)
            sent.append(bytes_sent() - before)
        held = sum(states_before_last_backward(trainer, batch).values())
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (held, median_low(sent)))
        found.append(every)
    return found


def rows(way: Way, num_ranks: int) -> Iterator[Row]:
    """The four ZeRO stages."""
    target, cluster = load_target(*MODEL), parse_cluster(f"cpu:{num_ranks}")
    program = capture_target(target, way.options(num_ranks, 0, 1))
    plans = [
        plan_program(program, target, cluster, way.options(num_ranks, zero, count))
        for zero in range(4)
        for count in (1, MICROBATCHES)
    ]
    with links.network(num_ranks, MBIT) as places:
        found = on_ranks(places, measure, target, program, [dumps(plan) for plan in plans])
    for zero in range(4):
        once, several = found[2 * zero], found[2 * zero + 1]
        plan = plans[2 * zero + 1]
        numel = plan.model.num_parameters
        rules = policy("bf16", "adamw", plan.states)
        states = plan.stages[0].prediction.memory_bytes
        predicted = (
            sum(states[name] for name in ("parameters", "gradients", "optimizer")),
            sent_bytes(numel, rules, zero, num_ranks),
            sent_bytes(numel, rules, zero, num_ranks, MICROBATCHES),
        )
        ranks = zip(several, once, several, strict=True)
        measured = [(held[0], first[1], more[1]) for held, first, more in ranks]
        worst = max(measured, key=lambda each: _distance(each, predicted))
        yield Row(way, num_ranks, zero, _each(predicted, numel), _each(worst, numel))


def _distance(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def _each(values: Sequence[float], numel: int) -> tuple[float, float, float]:
    first, second, third = (value / numel for value in values)
    return first, second, third


def formula(zero: int, way: Way) -> str:
    """The bytes of states in Ψ, the parameters, and N, the ranks."""
    gradient = 4 if way.gradient_dtype == "master" else 2
    shard = 2 if way.offload == "optimizer" else 0
    whole, part = {
        0: (14 + gradient, 0),
        1: (2 + gradient, 12 + shard),
        2: (2, 12 + gradient + shard),
        3: (0, 12 + gradient + shard),
    }[zero]
    parts = [f"{whole}Ψ"] * bool(whole) + [f"{part}Ψ/N"] * bool(part)
    return " + ".join(parts)


def tables(found: Sequence[Row]) -> Iterator[str]:
    """A table in Markdown for each way to hold states."""
    for way in dict.fromkeys(row.way for row in found):
        yield f"**{way.title[0].upper()}{way.title[1:]}**, bytes per parameter:"
        yield ""
        yield (
            "| ranks | ZeRO | states | predicted | measured | sent, 1 micro-batch | measured "
            f"| sent, {MICROBATCHES} micro-batches | measured |"
        )
        yield "|---|---|---|---|---|---|---|---|---|"
        for row in (row for row in found if row.way == way):
            cells = [f"{row.num_ranks}", f"{row.zero}", formula(row.zero, way)]
            for predicted, measured in zip(row.predicted, row.measured, strict=True):
                cells += [f"{predicted:.2f}", f"{measured:.3f}"]
            yield f"| {' | '.join(cells)} |"
        yield ""
    worst = max(row.worst_error for row in found)
    yield f"Largest difference between predicted and measured: {worst:.1%}."


def write(path: Path, text: str) -> None:
    """Replace what stands between the markers of a document."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", help="write the tables into this document, between its markers")
    options = parser.parse_args()
    found = [row for way in WAYS for count in options.ranks for row in rows(way, count)]
    text = "\n".join(tables(found))
    print(text)
    if options.write:
        write(Path(options.write), text)
    if max(row.worst_error for row in found) > ALLOWED:
        raise SystemExit(f"a figure is more than {ALLOWED:.0%} from what was predicted")


if __name__ == "__main__":
    main()
