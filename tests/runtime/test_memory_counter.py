"""Counted memory of real training steps, and predictions held to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_processes
from torch import nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.memory.stage_memory import stage_memory
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_program, capture_target
from autoparallel.planning.capture import record_target as record
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target
from benchmarks.memory.step_memory import MemoryReport, measure_peak, measure_step

BOUND = 0.05


def test_a_step_is_counted_by_category() -> None:
    """A linear layer without bias: it keeps its input, and AdamW two states."""
    layer, x = nn.Linear(100, 50, bias=False), torch.ones(20, 100)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    def held() -> dict[str, list[torch.Tensor]]:
        states = [s for own in optimizer.state.values() for s in own.values()]
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        return {
            "parameters": list(layer.parameters()),
            "optimizer": states,
            "gradients": gradients,
            "batch": [x],
        }

    step()
    report = measure_peak(step, held)
    assert report.by_category["parameters"] == 100 * 50 * 4 + 32
    assert report.by_category["optimizer"] == 2 * (100 * 50 * 4 + 32) + 64
    assert report.by_category["gradients"] == 100 * 50 * 4 + 32
    assert report.by_category["batch"] == 20 * 100 * 4
    assert report.peak_bytes == sum(report.by_category.values())
    assert report.between_bytes <= report.peak_bytes


@pytest.mark.gpu
def test_a_gpu_allocates_what_is_counted() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    x = torch.ones(512, 1024, device=device)

    def step() -> None:  # a sum alone has a gradient of stride 0, which a product copies uncounted
        model(x).square().sum().backward()

    step()
    model.zero_grad()
    report = measure_peak(step, lambda: {"held": [x, *model.parameters()]}, device=device)
    assert report.allocator_peak_bytes is not None
    counted = report.peak_bytes
    workspace = torch.cuda.memory_allocated(device) - report.between_bytes
    assert report.allocator_peak_bytes - workspace == pytest.approx(counted, rel=0.02)


def train(cases: list[tuple[str, int | None, str]]) -> list[int]:
    """On a rank: for each (example, sequence length, plan file) the least peak of three steps."""
    found = []
    for model, seq, text in cases:
        plan, target = loads(text, "test"), load_target(f"examples/{model}.py", SETTINGS[model])
        deferred = record(target, 0)
        program = capture_program(
            target,
            deferred,
            global_batch=plan.model.global_batch,
            seq=seq,
            precision=plan.model.precision,
            autocast=plan.model.float32_ops == "autocast",
        )
        trainer = Trainer(program, plan, deferred, device=torch.device("cpu"))
        batch = random_batch(program.graph.with_batch_size(plan.model.global_batch), seed=0)
        trainer.step(batch)
        reports = [measure_step(trainer, batch) for _ in range(3)]
        found.append(min(_without_batch(report) for report in reports))
    return found


def _without_batch(report: MemoryReport) -> int:
    return report.peak_bytes - report.by_category.get("batch", 0)


SETTINGS: dict[str, dict[str, int]] = {
    "gpt": {},
    "mlp_mixer": {},
    "gshard_moe": {"d_model": 256, "d_ff": 2048, "n_layer": 4},
}
SAMPLE = (
    ("gpt", 64, "dp=2,zero=3,microbatches=4", "bf16"),
    ("mlp_mixer", None, "pp=2,schedule=gpipe,microbatches=4", "fp32"),
    ("gshard_moe", 64, "tp=2,recompute=full", "fp32"),
)
JOINT = (
    ("gshard_moe", 64, "dp=4,ep=2,zero=1", "fp32"),
    ("gshard_moe", 64, "dp=4,ep=2,zero=3,microbatches=2", "fp32"),
    ("gshard_moe", 64, "dp=4,ep=4,zero=2,microbatches=2", "fp32"),
    ("gpt", 64, "dp=2,cp=2,zero=2,microbatches=2", "bf16"),
    ("gpt", 64, "dp=4,zero=3,shard=2,microbatches=2", "bf16"),
    ("gpt", 64, "dp=4,zero=2,shard=2,microbatches=2", "fp32"),
)
"""Plans that shard states over several axes together."""


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "num_ranks"), [(SAMPLE, 2), (JOINT, 4)], ids=["few", "joint"])
def test_the_predicted_peak_is_the_measured_one(
    cases: Any, num_ranks: int, monkeypatch: Any, request: Any
) -> None:
    """A few models and plans; ``benchmarks/memory`` has the others."""
    monkeypatch.chdir(request.config.rootpath)
    jobs, expected, devices = [], [], []
    for model, seq, parallel, precision in cases:
        target = load_target(f"examples/{model}.py", SETTINGS[model])
        options = PlanOptions(
            global_batch=8, seq=seq, precision=precision, forced=parse_parallel(parallel)
        )  # type: ignore[arg-type]
        program = capture_target(target, options)
        plan = plan_program(program, target, parse_cluster(f"cpu:{num_ranks}"), options)
        jobs.append((model, seq, dumps(plan)))
        expected.append(stage_memory(plan, program.graph, program.blocks))
        devices.append([stage.devices for stage in plan.stages])
    found = run_processes(num_ranks, train, jobs, timeout_seconds=240)
    for number, stages in enumerate(expected):
        for exact, ranks in zip(stages, devices[number], strict=True):
            assert exact is not None
            measured = min(found[rank][number] for rank in ranks)
            assert sum(exact.values()) == pytest.approx(measured, rel=BOUND), cases[number]
