"""Prices of sequences of several lengths beside steps measured on emulated clusters.

``python benchmarks/regret/lengths.py`` (needs root and ``iproute2``; about five minutes). A GPT is
planned for two sequences of 512 positions split over four devices. Steps of the planned batch, of
shorter ones padded into buckets, and of more sequences in a bucket take turns. Printed are the mean
step of a corpus of lengths by measured medians and by ``explain --lengths``' formulas, both
relative to steps padded to the planned length.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import links
import torch
from clusters import BYTES_PER_SECOND, CLUSTERS, FLOPS_PER_SECOND, Emulated
from device import EmulatedDevice
from ranks import COMPARED_STEPS, CPU, Job, _step, measure_issue, measure_network, on_ranks
from run import EXAMPLES, make_plan

from autoparallel.analysis.lengths import Bucketed, Shape, _options, _Steps
from autoparallel.cache.database import environment_for
from autoparallel.cost_model.profile.lookup import Profile
from autoparallel.cost_model.profile.records import Transfer
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.evaluate.evaluate import Evaluator
from autoparallel.planner.plan_file import loads
from autoparallel.planning.capture import capture_target, record_target
from autoparallel.runtime.data.variants import bucket_variants, variant_of
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target

LENGTH, ROWS = 512, 2
GPT = {"n_layer": 4, "d_model": 192, "n_head": 4, "seq": LENGTH}
JOB: Job = (str(EXAMPLES / "gpt.py"), GPT, ROWS, LENGTH)
WAYS = ("cp=4,zero=0,microbatches=1", "cp=4,zero=3,microbatches=1")
SHAPES: tuple[Shape, ...] = ((64, 2), (64, 16), (192, 2), (192, 4))
ROUNDS = 12


def main() -> int:
    torch.set_num_threads(1)
    drawn = random.Random(0)
    lengths = sorted(min(LENGTH, max(8, int(drawn.lognormvariate(4.0, 1.0)))) for _ in range(1000))
    steps = _Steps(lengths, ROWS)
    print(f"1,000 lengths of mean {statistics.fmean(lengths):.0f}, {ROWS} a step", flush=True)
    for emulated in CLUSTERS[:2]:
        with links.network(emulated.num_ranks, emulated.mbit, emulated.uplinks) as places:
            emulated = replace(emulated, issue_seconds=on_ranks(places, measure_issue))
            transfers = on_ranks(places, measure_network, emulated)
            for way in WAYS:
                made = make_plan(emulated, JOB, way, transfers)
                assert made is not None
                measured = on_ranks(places, measured_steps, made[2])
                predicted = predicted_steps(emulated, made[2], transfers)
                show(f"{emulated.name}, {way}", steps, measured, predicted)
    return 0


def measured_steps(rank: int, text: str) -> dict[Shape, float]:
    """The median seconds of a step of each shape; steps of all shapes take turns."""
    target = load_target(JOB[0], GPT)
    program = capture_target(target, PlanOptions(global_batch=ROWS, seq=LENGTH))
    trainer = Trainer(program, loads(text), record_target(target), device=CPU, buckets=SHAPES)
    trainer.runner.batches._check._num_steps = COMPARED_STEPS
    device = EmulatedDevice(FLOPS_PER_SECOND, BYTES_PER_SECOND)
    found: dict[Shape, list[float]] = {shape: [] for shape in ((LENGTH, ROWS), *SHAPES)}
    for number in range(ROUNDS + 1):
        for (length, rows), seconds in found.items():
            batch = random_batch(program.graph.with_batch_size(rows), seed=number)
            cut = {name: each[:, :length] for name, each in batch.items()}
            seconds.append(_step(trainer, cut, device))
    trainer.steps.finish()
    return {shape: statistics.median(seconds[1:]) for shape, seconds in found.items()}


def predicted_steps(
    emulated: Emulated, text: str, transfers: Sequence[Transfer]
) -> dict[Shape, float]:
    """The predicted seconds of a step of each shape, in the layouts that are run."""
    plan, cluster = loads(text), emulated.cluster()
    environment = environment_for(cluster)
    assert environment is not None
    basis = Basis(Profile(environment, {}, tuple(transfers)), "auto")
    target = load_target(JOB[0], GPT)
    program = capture_target(target, PlanOptions(global_batch=ROWS, seq=LENGTH))
    found = {(LENGTH, ROWS): plan.prediction.step_seconds}
    for variant in bucket_variants(variant_of(program, plan), SHAPES):
        (own,) = variant.slices
        pricing = Evaluator(own.graph, own.blocks, basis=basis)
        shape = (variant.shape.length or LENGTH, variant.shape.rows)
        found[shape] = pricing.evaluation(own.plan, cluster).step_seconds
    return found


def show(
    name: str, steps: _Steps, measured: Mapping[Shape, float], predicted: Mapping[Shape, float]
) -> None:
    """Print the steps of each shape, and the means of the corpus."""
    print(f"\n{name}\n\n| batch | measured | predicted | error |\n|---|---|---|---|")
    for (length, rows), own in measured.items():
        priced = predicted[length, rows]
        print(f"| {rows} × {length} | {own:.3f} s | {priced:.3f} s | {priced / own - 1:+.0%} |")
    print("\n| steps | measured | predicted |\n|---|---|---|")
    both = []
    for seconds in (measured, predicted):
        drawn = {shape: each for shape, each in seconds.items() if shape[1] == ROWS}
        both.append((*_options(steps.bucketed, drawn), *_options(steps.grouped, seconds)[1:]))
    for one, two in zip(*both, strict=True):
        print(f"| {_words(one)} | {_gain(both[0][0], one)} | {_gain(both[1][0], two)} |")
    sys.stdout.flush()


def _words(one: Bucketed) -> str:
    pairs = zip(one.buckets, one.rows, strict=True)
    return ", ".join(f"{rows} × {length}" for length, rows in pairs)


def _gain(padded: Bucketed, one: Bucketed) -> str:
    return f"{one.tokens_per_second / padded.tokens_per_second:.2f} times the tokens/s"


if __name__ == "__main__":
    sys.exit(main())
