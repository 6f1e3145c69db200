"""What depends on the whole batch equals one device: losses by their labels, batch norm, buffers.

As ``test_verification``: float64, two AdamW steps, losses, gradients, weights and buffers to
1e-9, with labels of which each row ignores another share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_captures import capture_once
from one_device import build_optimizer, reference_of
from processes import run_processes

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference, reference_split
from autoparallel.runtime.verify.verify import Verification, verify
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

ROOT = Path(__file__).parent.parent
ROWS = 8
IGNORED = -100

MASKED = "tests/models/masked_lm.py"
LOSSES = {
    "mean": {"loss": "mean"},
    "smoothed": {"loss": "mean", "smoothing": 0.1},
    "weighted": {"loss": "weighted", "smoothing": 0.1},
    "sum": {"loss": "sum"},
    "masked": {"loss": "masked"},
    "normalized": {"loss": "normalized"},
    "nll": {"loss": "nll"},
    "mean of random ones": {"loss": "mean", "is_random": True},
    "masked at random": {"loss": "masked", "is_random": True},
}
ROUTED = "tests/models/routed_experts.py"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (ROUTED, {"loss": name}) for name in ("balance", "z", "sequence")},
    **{name: (ROUTED, {"counts": name}) for name in ("real", "integer", "sign")},
    "capacity": (ROUTED, {"capacity": 8}),
    **{name: (MASKED, settings) for name, settings in LOSSES.items()},
    "average": ("tests/models/moving_average.py", {}),
    "wide_resnet": ("examples/wide_resnet.py", {"width": 1}),
    "unet": ("examples/unet.py", {"channels": 8, "depth": 1}),
    "diffusion": ("examples/diffusion.py", {"channels": 8, "depth": 1}),
    "mlp_mixer": ("examples/mlp_mixer.py", {"channels": 16, "n_layer": 2}),
}
GRAPHS = ("mean", "sum", "masked at random", "wide_resnet", "unet", "integer", "sequence")
RECOMPUTED = "tp=2,microbatches=2,recompute=full"
IN_PARTS = ("pp=2,microbatches=4", "tp=2,microbatches=2,recompute=full", "dp=2,microbatches=4")
CASES = {
    2: [(model, RECOMPUTED) for model in ("sum", "nll")]
    + [("average", "dp=2"), ("wide_resnet", "dp=2,microbatches=2")]
    + [("balance", "dp=2"), ("capacity", "dp=2"), ("integer", "dp=2,microbatches=2")]
    + [("diffusion", "dp=2,zero=3,microbatches=2")],
}
MORE = {
    2: [(m, RECOMPUTED) for m in LOSSES if m not in ("sum", "nll")]
    + [("average", "tp=2"), ("average", "dp=2,microbatches=2")]
    + [("wide_resnet", p) for p in ("dp=2", "tp=2", "pp=2", "dp=2,recompute=full")]
    + [(model, p) for model in ("diffusion", "mlp_mixer") for p in ("dp=2", "tp=2", "pp=2")]
    + [("unet", p) for p in ("dp=2", "tp=2", "pp=2")]
    + [(m, p) for m in ("balance", "sign", "capacity") for p in ("tp=2", "pp=2", "dp=2,zero=3")]
    + [(m, p) for m in ("z", "sequence", "real", "integer") for p in IN_PARTS]
    + [(m, "dp=2,microbatches=2") for m in ("balance", "sign")],
    4: [(m, "dp=2,pp=2,microbatches=4") for m in LOSSES]
    + [("wide_resnet", "dp=2,tp=2")]
    + [(model, "dp=2,pp=2,microbatches=2") for model in ("unet", "diffusion")],
}
"""Cases that are slow."""


def target(model: str) -> Target:
    path, settings = MODELS[model]
    return load_target(str(ROOT / path), settings)


@cache
def captured(model: str, precision: str) -> tuple[Deferred, Program]:
    found, rows = target(model), ROWS if model == "capacity" else 2
    return capture_once(found, found.example_batch(rows, None), precision)  # type: ignore[arg-type]


@cache
def planned(model: str, parallel: str) -> Plan:
    forced = parse_parallel(parallel)
    devices = (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)
    options = PlanOptions(global_batch=ROWS, forced=forced)
    return plan_program(
        captured(model, "fp32")[1], target(model), parse_cluster(f"cpu:{devices}"), options
    )


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    """Two random batches; row r of the labels ignores about 10 r percent."""
    graph = captured(model, "fp64")[1].graph.with_batch_size(ROWS)
    found = [random_batch(graph, seed=step) for step in range(2)]
    for step, batch in enumerate(found):
        name = {"labels", "classes"} & set(batch)
        if name and batch[min(name)].dim() > 1:
            labels = batch[min(name)]
            generator = torch.Generator().manual_seed(step)
            percent = 10 * torch.arange(ROWS).view(-1, *[1] * (labels.dim() - 1))
            labels[torch.randint(100, labels.shape, generator=generator) < percent] = IGNORED
    return found


def reference(model: str, trainer: Trainer) -> Reference:
    program = captured(model, "fp64")[1]
    return reference_of(
        target(model),
        program,
        batches(model),
        split=partial(reference_split, trainer.model.planned),
    )


def verify_all(cases: list[tuple[str, str]]) -> list[Verification]:
    """On a rank: each (model, plan file) verified in turn."""
    return [_verified(model, text) for model, text in cases]


def _verified(model: str, text: str) -> Verification:
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(model, "fp64")
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"), build=build_optimizer)
    return verify(trainer, batches(model), lambda: reference(model, trainer))


@cache
def results(num_ranks: int) -> dict[tuple[str, str], Verification]:
    """Every case of that many ranks, run in one set of processes."""
    return verified(num_ranks, CASES[num_ranks])


@cache
def more_results(num_ranks: int) -> dict[tuple[str, str], Verification]:
    return verified(num_ranks, MORE[num_ranks])


def verified(num_ranks: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Verification]:
    plans = [(model, dumps(planned(model, parallel))) for model, parallel in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


@pytest.mark.parametrize(
    ("num_ranks", "model", "parallel"),
    [(ranks, model, parallel) for ranks, cases in CASES.items() for model, parallel in cases],
)
def test_a_plan_equals_one_device_on_the_whole_batch(
    num_ranks: int, model: str, parallel: str
) -> None:
    check(results(num_ranks)[model, parallel])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "model", "parallel"),
    [(ranks, model, parallel) for ranks, cases in MORE.items() for model, parallel in cases],
)
def test_more_plans_equal_one_device_on_the_whole_batch(
    num_ranks: int, model: str, parallel: str
) -> None:
    check(more_results(num_ranks)[model, parallel])


def check(found: Verification) -> None:
    assert found.passed, found.failures[:5]
    assert found.worst("weight") >= 0.0


def test_every_buffer_that_training_changes_is_compared() -> None:
    found = results(2)["average", "dp=2"]
    names = {d.name for d in found.differences if d.quantity == "buffer"}
    assert names == {
        "average",
        "count",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_rows_that_see_each_other_stay_in_one_micro_batch_unless_asked() -> None:
    assert planned("wide_resnet", "pp=2").num_microbatches == 1
    assert planned("wide_resnet", "dp=2,microbatches=2").num_microbatches == 2
    found = planned("balance", "pp=2")
    assert found.num_microbatches == 1
    assert "samples meet in mul of layers.0.router (routed_experts.py:" in (
        found.undivided_batch or ""
    )
    assert not planned("sequence", "pp=2").undivided_batch


def test_a_model_whose_samples_meet_in_no_sum_names_the_line_that_needs_them_all() -> None:
    with pytest.raises(UsageError, match="AP125") as raised:
        planned("capacity", "dp=2,microbatches=2")
    text = Path(ROOT / ROUTED).read_text().splitlines()
    path, line = raised.value.where.rsplit(":", 1)
    assert path.endswith(ROUTED)
    assert "cumsum" in text[int(line) - 1]


def test_counts_of_tokens_add_up_over_micro_batches() -> None:
    found = results(2)["integer", "dp=2,microbatches=2"]
    compared = {d.name: d for d in found.differences if d.quantity == "buffer"}
    assert compared["layers.0.router.tokens_per_expert"].relative == 0.0


def test_the_share_of_each_micro_batch_follows_from_the_graph() -> None:
    found = {name: captured(name, "fp32")[1].graph.accumulation for name in GRAPHS}
    assert found["mean"].counted == ("cross_entropy_loss",)
    assert not found["mean"].sums
    assert found["sum"].sums == ("cross_entropy_loss",)
    assert len(found["masked at random"].totals) == 1
    assert not found["masked at random"].mixing
    assert found["wide_resnet"].mixing
    assert not found["unet"].mixing
    counts = ("layers.0.router.tokens_per_expert", "layers.1.router.tokens_per_expert")
    assert found["integer"].means == counts
    assert not found["integer"].mixing
    assert not found["sequence"].mixing
