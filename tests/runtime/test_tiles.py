"""Last ops of recomputed blocks in tiles: steps of every kind of plan equal one device's.

The ranks cut values of any size, as no small model has values that are worth it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from any_tiles import cut_all
from processes import run_processes
from test_verification import captured, check_verified, target, verify_all

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.local.tiles import TiledCall
from autoparallel.planner import ops as rules
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.kernels.tiles import last_region
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program

QUICK = (
    ("llama", "dp=2,tp=2,zero=3,microbatches=8"),
    ("llama", "cp=2,tp=2,microbatches=16"),
    ("shared", "dp=2,tp=2,ep=4,microbatches=8"),
    ("mixtral", "dp=4,ep=4,zero=3,microbatches=2"),
    ("loss:z", "dp=2,tp=2,microbatches=4"),
    ("loss:distilled", "dp=2,tp=2,microbatches=8"),
)
VOCABULARY = 48
LOSSES = "plain", "smoothed", "capped", "z", "distilled"
CASES = (
    *QUICK,
    ("llama", "dp=4,zero=3,microbatches=1"),
    ("llama", "dp=4,zero=2,microbatches=4"),
    ("llama", "dp=2,tp=2,zero=1,microbatches=2"),
    ("llama", "dp=2,tp=2,microbatches=8 without sp"),
    ("llama", "dp=2,cp=2,microbatches=8"),
    ("llama", "dp=2,cp=2,microbatches=2"),
    ("llama", "cp=4,microbatches=16"),
    ("llama", "tp=4,microbatches=16"),
    ("llama", "tp=4,microbatches=16 without sp"),
    ("llama", "tp=2,pp=2,microbatches=16,schedule=1f1b"),
    ("llama", "pp=2,dp=2,microbatches=4,schedule=interleaved"),
    ("gpt-tied", "dp=2,pp=2,zero=3,microbatches=2,schedule=1f1b"),
    ("gpt-tied", "tp=4,microbatches=8"),
    ("gemma2", "dp=2,tp=2,microbatches=4"),
    ("gemma2", "dp=2,tp=2,microbatches=8"),
    ("dropout", "dp=4,microbatches=2"),
    ("dropout", "cp=4,microbatches=16"),
    ("mixtral", "dp=2,tp=2,ep=4,microbatches=2"),
    ("mixtral", "dp=2,tp=2,ep=4,microbatches=8"),
    ("mixtral", "dp=2,ep=2,pp=2,microbatches=4,schedule=1f1b"),
    ("shared", "dp=4,ep=4,microbatches=4"),
    ("deepseek_v3", "dp=2,tp=2,ep=4,microbatches=8"),
    ("deepseek_v3", "dp=4,ep=4,microbatches=2"),
    *(
        (f"loss:{loss}", parallel)
        for loss in LOSSES
        for parallel in (
            "tp=4,microbatches=16",
            "cp=4,microbatches=16",
            "dp=4,zero=3,microbatches=1",
        )
    ),
)
"""Models and degrees; two rows of a rank and more are cut by rows, one is cut by positions."""


@cache
def planned(model: str, parallel: str) -> str:
    degrees, without, denied = parallel.partition(" without ")
    forced = parse_parallel(f"{degrees},recompute=full")
    options = PlanOptions(global_batch=16, seq=16, forced=forced, deny=(denied,) if without else ())
    program = captured(model, "fp32")[1]
    with pytest.MonkeyPatch.context() as patch:
        cut_all(patch.setattr)
        found = plan_program(program, target(model), parse_cluster("cpu:4"), options)
    return dumps(found)


def verify_tiled(cases: list[tuple[str, str]]) -> list[Any]:
    """On a rank: each (model, plan file) verified, with the number of tiles that it ran."""
    cut_all()
    counted: Counter[str] = Counter()
    forward = TiledCall.forward

    def counting(self: TiledCall, *args: Any) -> Any:
        counted["tiles"] += len(self.programs)
        return forward(self, *args)

    TiledCall.forward = counting  # type: ignore[method-assign]
    found = []
    for case in cases:
        counted.clear()
        (own,) = verify_all([case])
        found.append((own, counted["tiles"]))
    return found


@cache
def results(*cases: tuple[str, str]) -> dict[Any, Any]:
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(4, verify_tiled, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[len(QUICK) :])],
)
def test_a_plan_with_tiles_equals_one_device(model: str, parallel: str) -> None:
    case = model, parallel
    found, count = results(*(QUICK if case in QUICK else CASES[len(QUICK) :]))[case]
    check_verified(found)
    assert loads(planned(model, parallel), "test").tiles > 1
    assert count > 1


@pytest.mark.parametrize("loss", LOSSES)
def test_no_logits_of_a_loss_are_whole(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region has the loss itself and all ops on values as wide as the vocabulary."""
    cut_all(monkeypatch.setattr)
    program = captured(f"loss:{loss}", "fp32")[1]
    head = program.blocks.blocks[-1].nodes
    found = last_region(head, program.graph, rules, Mesh(("dp",), (1,)))
    assert found is not None
    assert head[-1] in found.strategies
    wide = {name for name in head if VOCABULARY in program.graph[name].spec.shape}
    assert len(wide) > 1
    assert wide <= found.strategies.keys()
