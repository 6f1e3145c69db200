"""Few layers stand for a deeper model, and a source's program costs what its figures say."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.compute import rate
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.stage.stage_cost import StageCost
from benchmarks.validation.depth import deeper
from benchmarks.validation.sources import Program as Setup
from examples.gpt import GPT, example_batch

ROWS = 4


@cache
def program(num_layers: int) -> Program:
    with torch.device("meta"):
        model = GPT(n_layer=num_layers, d_model=64, n_head=4, seq=32, vocab=128, tied=False)
    return capture(model, example_batch(2, 32), dtype="bfloat16")


def priced(captured: int, depth: int, **options: Any) -> PricedStep:
    own = program(captured)
    asked = Configuration(precision="bf16", microbatch_size=ROWS, **options)
    pricer = ConfigurationPricer(*deeper(own.graph, own.blocks, depth))
    return pricer.price(parse_cluster(f"{asked.num_devices}xA100-80GB"), asked)


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2},
        {"pp": 2, "num_microbatches": 4},
        {"pp": 2, "num_microbatches": 4, "schedule": "interleaved-1f1b", "num_chunks": 3},
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    ],
    ids=str,
)
@pytest.mark.parametrize("captured", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_few_layers_stand_for_a_deeper_model(captured: int, options: dict[str, Any]) -> None:
    few, many = priced(captured, 7, **options), priced(7, 7, **options)
    assert few.step_seconds == pytest.approx(many.step_seconds, rel=1e-12)
    assert [dict(each) for each in few.memory_bytes] == [dict(each) for each in many.memory_bytes]


def test_the_graph_is_that_of_the_deeper_model() -> None:
    graph, blocks = deeper(program(4).graph, program(4).blocks, 7)
    many = program(7)

    def ops(of: Graph) -> list[tuple[str, list[str]]]:
        return [(n.op, [of[ref.name].op for ref in n.inputs]) for n in of if n.kind == "op"]

    assert ops(graph) == ops(many.graph)
    assert [b.kind for b in blocks.blocks] == [b.kind for b in many.blocks.blocks]
    assert sorted(p.spec.numel for p in graph.parameters) == sorted(
        p.spec.numel for p in many.graph.parameters
    )


def test_too_few_layers_cannot_be_repeated() -> None:
    own = program(2)
    with pytest.raises(ValueError, match="2 layers cannot stand for 5"):
        deeper(own.graph, own.blocks, 5)
    with pytest.raises(ValueError, match="4 layers cannot stand for 3"):
        deeper(program(4).graph, program(4).blocks, 3)


def stage() -> StageCost:
    (found,) = priced(4, 4, dp=2).stages
    return found


def test_a_program_adds_to_every_microbatch_and_message() -> None:
    base, device = stage(), parse_cluster("2xA100-80GB").hosts[0].device
    last = Setup(loss_seconds=0.5).around(base, device, is_first=True, is_last=True)
    passes = last.forward_seconds + last.backward_seconds
    assert passes == pytest.approx(base.forward_seconds + base.backward_seconds + 0.5)
    assert Setup(loss_seconds=0.5).around(base, device, is_first=True, is_last=False) == base
    late = Setup(message_seconds=0.5).around(base, device, is_first=False, is_last=True)
    before = base.receive_seconds
    assert late.receive_seconds == pytest.approx((before[0] + 0.5, before[1] + 0.5))


def test_gradients_that_are_kept_twice_and_added_by_kernels_cost_bytes_and_passes() -> None:
    base, device = stage(), parse_cluster("2xA100-80GB").hosts[0].device
    own = Setup(second_gradients=0.5, accumulation=3.0)
    found = own.around(base, device, is_first=True, is_last=True)
    gradients = base.memory_bytes["gradients"]
    assert found.total_bytes - base.total_bytes == pytest.approx(gradients / 2)
    added = rate(device, "elementwise", "bfloat16").seconds(0.0, 3 * gradients)
    assert added > 3 * gradients / device.memory_bytes_per_second
    more = found.seconds.backward_compute - base.seconds.backward_compute
    assert more == pytest.approx(added)
    assert found.seconds.forward_compute == base.seconds.forward_compute
