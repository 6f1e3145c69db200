"""Planning as commands and Python ask for it: what is made of the plan that the search found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from handmade import pipeline_plan
from marks import slow
from torch import Tensor, nn

import autoparallel
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.cache.store import SqliteStore
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.plan import Plan
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, plan_program, within_limit
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.target.from_python import make_target
from autoparallel.target.load import load_target

GPT = load_target("examples/gpt.py", {"n_layer": 2, "d_model": 512, "n_head": 8, "seq": 512})
OPTIONS = PlanOptions(
    global_batch=64,
    seq=512,
    precision="bf16",
    profile="analytic",
    forced=parse_parallel("pp=2,microbatches=4,schedule=1f1b"),
)
CLUSTER = "2xH100"


def peak(plan: Plan) -> int:
    return plan.prediction.peak_memory_bytes


def test_a_plan_keeps_the_limit_with_its_messages_and_communicators() -> None:
    without = peak(plan_program(capture_target(GPT, OPTIONS), GPT, find_cluster(CLUSTER), OPTIONS))
    final = peak(make_plan(GPT, CLUSTER, OPTIONS))
    limit = final - 50_000_000
    assert without < limit < final  # the search takes the plan for one that fits
    found = make_plan(GPT, CLUSTER, replace(OPTIONS, memory_limit_bytes=limit))
    assert peak(found) <= limit


def test_the_search_goes_on_until_the_final_memory_keeps_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans of which each needs other bytes that the search does not count."""
    plan = pipeline_plan()

    def needing(num_bytes: int) -> Plan:
        return replace(plan, prediction=replace(plan.prediction, peak_memory_bytes=num_bytes))

    uncounted = {1000: 100, 900: 20, 850: 160, 840: 20}
    searched = []

    def search(limit: int) -> Plan:
        searched.append(limit)
        return needing(max(size for size in uncounted if size <= limit))

    def kept(found: Plan, *_: object) -> Plan:
        size = found.prediction.peak_memory_bytes
        return needing(size + uncounted[size])

    monkeypatch.setattr("autoparallel.planning.plan.with_cached_memory", kept)
    monkeypatch.setattr("autoparallel.planning.plan.check_host_memory", lambda *_: ())
    program = SimpleNamespace(graph=None, blocks=None)

    def final(limit: int) -> int:
        searched.clear()
        found = within_limit(search(limit), program, limit, search, NO_CACHE)  # type: ignore[arg-type]
        return found.prediction.peak_memory_bytes

    assert final(1000) == 920
    assert searched == [1000, 900]
    uncounted |= {900: 150, 840: 170, 830: 90}
    assert final(1000) == 920
    assert searched == [1000, 900, 850, 840, 830]


class Shared(nn.Module):
    """Three layers, of which the first and the last are one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 9), nn.Linear(9, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))
        self.layers[-1] = self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        for layer in self.layers:
            z = z + layer(z)
        return self.last(z).square().mean()


class SequenceFirst(nn.Module):
    """torch's own encoder, whose first layer reads a transposed value and the others do not."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.table, self.layers = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.table(x).transpose(0, 1)
        return self.layers(z, src_key_padding_mask=x == 0).square().mean()


def test_a_model_is_planned_whose_batches_all_have_the_same_rows(tmp_path: Path) -> None:
    """Two rows are captured where there are such batches; else the global batch alone is."""

    def example_batch(global_batch: int) -> tuple[Tensor]:
        if global_batch != 8:
            raise ValueError("all graphs of the data are one batch of 8")
        return (torch.empty(8, 4, device="meta"),)

    target = make_target(Shared, example_batch, None)
    options = PlanOptions(global_batch=8, profile="analytic")
    cache = Cache(SqliteStore(tmp_path / "cache.sqlite", "here", 10**9))
    for reused in (0, 1):
        program = capture_target(target, options, cache=cache)
        assert program.graph.inputs[0].spec.shape == (8, 4)
        assert cache.reused["capture"] == reused


@pytest.mark.parametrize(
    ("build", "batch", "asked"),
    [
        (Shared, (torch.empty(8, 4, device="meta"),), "pp=2"),
        slow(SequenceFirst, (torch.empty(8, 7, dtype=torch.int64, device="meta"),), "tp=2"),
        (SequenceFirst, (torch.empty(8, 7, dtype=torch.int64, device="meta"),), "dp=2"),
    ],
)
def test_layers_that_differ_in_what_they_hold_or_copy_are_priced_apart(
    build: Callable[[], nn.Module], batch: tuple[Tensor, ...], asked: str
) -> None:
    """If the search priced such layers alike, ``evaluate`` would differ and end it with AP999."""
    found = autoparallel.plan(build, batch, cluster="cpu:2", parallel=asked, progress=False)
    assert found.prediction.step_seconds > 0
