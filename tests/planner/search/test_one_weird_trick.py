"""The test of Krizhevsky (2014): data parallel convolutions, tensor parallel weights after them.

AlexNet on one host of n devices with slow links. Per step, and per device in ring collectives
(factor r = (n - 1) / n), float32, B images:

- a layer whose weights hold W numbers, batch split: its gradients are summed, 2 r · 4 W bytes;
- a convolution split by channels: at least its input is gathered and that gradient summed, or
  its output summed and that gradient shared: 2 r · 4 B · a bytes, a the fewer numbers of the
  two per image;
- the fully connected layers split by weights: the features (9216 numbers per image) are
  exchanged from split by image to split by feature, forward and back: 2 r · 4 B · 9216 / n;
  the result of the first (4096) and the third (1000) is summed, and of the second the
  gradient of its input: 2 r · 4 B · (4096 + 1000 + 4096).

With B = 128 and n = 4 (source: https://arxiv.org/abs/1404.5997, section 4).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from processes import run_processes

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.cluster_file import load_cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.capture.export import find_loss
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_model
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import run_reference
from autoparallel.runtime.verify.verify import Verification, verify
from autoparallel.target.load import load_target
from examples.alexnet import example_batch

BATCH, DEVICES = 128, 4
SHARE = (DEVICES - 1) / DEVICES
SMALL_SIZE = 96
SMALL = {"size": SMALL_SIZE, "width": 0.25, "hidden": 1024, "classes": 16}
SMALL_BATCH = 96
"""So many images that convolutions split by channels would send more than their gradients."""
CONVOLUTIONS = ("conv2d", "conv2d_1", "conv2d_2", "conv2d_3", "conv2d_4")
FULLY_CONNECTED = ("fc6.weight", "fc7.weight", "fc8.weight")


def cluster(num_devices: int) -> Cluster:
    """One host of A100 joined by PCIe 3: 12 GB/s against 19.5 TFLOP/s."""
    return load_cluster(
        f'name = "slow"\n[[hosts]]\nnum_devices = {num_devices}\n'
        'device = "A100-80GB"\nlink = "pcie3"'
    )


@cache
def program(small: bool, precision: Any = "fp32") -> Program:
    target = load_target("examples/alexnet.py", SMALL if small else {})
    model = record_build(target.build_model, seed=0).model
    batch = example_batch(2, SMALL_SIZE) if small else example_batch(2)
    return capture_model(model, batch, target.loss_fn, precision)


@cache
def planned(parallel: str = "") -> Plan:
    forced = parse_parallel(f"{parallel},microbatches=1".strip(","))
    options = PlanOptions(global_batch=BATCH, optimizer="sgd", forced=forced)
    target = load_target("examples/alexnet.py", {})
    return plan_program(program(small=False), target, cluster(DEVICES), options)


def sent_bytes(per_tensor: float) -> float:
    return 2 * SHARE * 4 * per_tensor


def test_by_hand_weights_are_cheaper_split_after_the_convolutions_and_only_there() -> None:
    graph = program(small=False).graph.with_batch_size(BATCH)
    for name in CONVOLUTIONS:
        node = graph[name]
        image, weight = (graph.spec(ref) for ref in node.inputs[:2])
        activations = min(image.numel if image.requires_grad else node.spec.numel, node.spec.numel)
        assert sent_bytes(weight.numel) < sent_bytes(activations)
    weights = sum(graph[name].spec.numel for name in FULLY_CONNECTED)
    assert weights == 9216 * 4096 + 4096 * 4096 + 4096 * 1000
    activations = BATCH * (9216 / DEVICES + 4096 + 1000 + 4096)
    assert sent_bytes(activations) < sent_bytes(weights) / 30


def test_the_planner_splits_the_batch_in_convolutions_and_weights_after_them() -> None:
    (stage,) = planned().stages
    assert stage.mesh.shape == (DEVICES,)
    graph = program(small=False).graph
    for name in CONVOLUTIONS:
        layout = stage.layouts[name]
        assert [str(each) for (each,) in layout.inputs] == ["S(0)", "R", "R"]
        assert [str(each) for (each,) in layout.outputs] == ["S(0)"]
    for name in FULLY_CONNECTED:
        (held,) = stage.layouts[name].outputs[0]
        (used,) = stage.layouts[graph.users[name][0]].inputs[1]
        assert held.is_shard
        assert used == held


def test_the_mixed_plan_is_faster_than_either_alone_by_what_is_not_sent() -> None:
    """What data parallelism sends and the mixed plan does not, at 12 GB/s: 352 MB, 29 ms, of
    which a part runs beside the backward.

    The mixed plan's axis is "tp", on which each gradient is priced as a sum of its own, with the
    latency of a collective: 0.4 ms more than in the buckets of "dp"."""
    plans = [planned(p) for p in ("", "dp=4", "tp=4")]
    mixed, data, tensor = (each.prediction.step_seconds for each in plans)
    seconds = [each.stages[0].prediction.seconds for each in plans]
    sums = [each["gradient_sync"] + each["parameter_gather"] for each in seconds]
    graph = program(small=False).graph
    weights = sum(graph[name].spec.numel for name in FULLY_CONNECTED)
    saved = sent_bytes(weights) / 12e9
    assert sums[1] - sums[0] == pytest.approx(saved, rel=0.25)
    assert 0.5 * saved < data - mixed < saved
    assert mixed < tensor
    assert mixed < 0.51 * data


def verified(text: str) -> Verification:
    """On a rank: two steps of the plan against one process."""
    plan, target = loads(text, "test"), load_target("examples/alexnet.py", SMALL)
    deferred = record_build(target.build_model, seed=0)
    found = program(small=True, precision="fp64")

    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def loss(model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        return find_loss(model(**inputs), inputs)

    trainer = Trainer(found, plan, deferred, device=torch.device("cpu"), build=build)
    graph = found.graph.with_batch_size(SMALL_BATCH)
    batches = [random_batch(graph, seed=step) for step in range(2)]
    return verify(
        trainer,
        batches,
        lambda: run_reference(
            plain_build(target.build_model, 0).double(), batches, loss=loss, build_optimizer=build
        ),
    )


@pytest.mark.slow
def test_both_on_one_axis_equal_one_device() -> None:
    options = PlanOptions(
        global_batch=SMALL_BATCH,
        precision="fp64",
        optimizer="sgd",
        forced=parse_parallel("pp=1,microbatches=1"),
    )
    target = load_target("examples/alexnet.py", SMALL)
    plan = plan_program(
        program(small=True, precision="fp64"), target, parse_cluster("cpu:2"), options
    )
    (stage,) = plan.stages
    assert stage.mesh.shape == (2,)
    assert {stage.layouts[name].labels for name in CONVOLUTIONS} == {("n",)}
    assert all(stage.layouts[name].outputs[0][0].is_shard for name in FULLY_CONNECTED[:2])
    (result, *_) = run_processes(2, verified, dumps(plan), timeout_seconds=200)
    assert result.passed, result.failures[:5]
    assert result.tolerance == 1e-9
