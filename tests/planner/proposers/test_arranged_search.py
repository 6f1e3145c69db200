"""Chimera and TeraPipe among the schedules that a plan chooses from: priced, where faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from small_graphs import cluster, mlp
from torch import Tensor, nn

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.find_plan import plan
from autoparallel.planner.graph.graph import Blocks, Graph, Node, Ref, TensorSpec
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import (
    CHUNKED_SCHEDULES,
    DERIVED_SCHEDULES,
    SCHEDULES,
    Forced,
    Request,
)
from autoparallel.planner.variants.slice_costs import carried_bytes

SAME = 1e-9
ALL = (*SCHEDULES, *CHUNKED_SCHEDULES, *DERIVED_SCHEDULES)
SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
"""Compute and wires so slow that weights are better not copied: pipelines win."""

WORDS, WIDTH, SEQ = 16, 32, 32
PIPELINE = Request(8, forced=Forced(pp=4, num_microbatches=4))
"""Few micro-batches: much of the step is filling and draining."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        heads = self.qkv(x).view(rows, seq, 3, 2, -1).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(rows, seq, width))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def deep() -> tuple[Graph, Blocks]:
    return mlp(8, rows=8)


@cache
def six() -> tuple[Graph, Blocks]:
    return mlp(6, rows=6)


@cache
def causal() -> tuple[Graph, Blocks]:
    with torch.device("meta"):
        model = Causal()
    batch = {
        name: torch.empty(2, SEQ, dtype=torch.int64, device="meta") for name in ("words", "labels")
    }
    program = capture(model, batch)
    return program.graph, program.blocks


FEW = Request(2, forced=Forced(pp=4, num_microbatches=2))
PLANS: dict[str, Plan] = {}
"""Several tests ask for the same plan."""


def found(
    model: tuple[Graph, Blocks], *allow: str, on: Cluster = SLOW, request: Request = PIPELINE
) -> Plan:
    key = repr((id(model), allow, on, request))
    if key not in PLANS:
        PLANS[key] = plan(*model, on, replace(request, features=features_of(allow, (), ALL)))
    return PLANS[key]


def check_priced(model: tuple[Graph, Blocks], own: Plan) -> None:
    again = evaluate(*model, own, SLOW)
    assert again.step_seconds == pytest.approx(own.prediction.step_seconds, rel=SAME)
    assert again.peak_memory_bytes == own.prediction.peak_memory_bytes
    assert 0 <= own.solver.bound_seconds <= own.prediction.step_seconds * (1 + SAME)


def test_two_ways_fill_the_pipeline_faster_than_one() -> None:
    """Four micro-batches on four ranks: 1F1B idles 3 of 7 parts, Chimera 2 of 8."""
    own, plain = found(deep(), "1f1b", "chimera"), found(deep(), "1f1b")
    assert (own.schedule, plain.schedule) == ("chimera", "1f1b")
    assert own.prediction.step_seconds < plain.prediction.step_seconds
    assert own.solver.bound_seconds > 0
    assert any("1F1B" in other.summary for other in own.alternatives)
    check_priced(deep(), own)


@pytest.mark.slow
def test_slices_fill_the_pipeline_faster_than_whole_sequences() -> None:
    own, plain = (
        found(causal(), "1f1b", "terapipe", request=FEW),
        found(causal(), "1f1b", request=FEW),
    )
    assert (own.schedule, plain.schedule) == ("terapipe", "1f1b")
    assert sum(own.slices) == SEQ
    assert len(own.slices) > 1
    assert own.prediction.step_seconds < plain.prediction.step_seconds
    assert own.prediction.peak_memory_bytes > plain.prediction.peak_memory_bytes
    check_priced(causal(), own)


@pytest.mark.parametrize(
    ("model", "request_"), [(deep, PIPELINE), pytest.param(causal, FEW, marks=pytest.mark.slow)]
)
def test_more_schedules_are_never_slower(model, request_) -> None:
    steps = [
        found(model(), *ALL[:number], request=request_).prediction.step_seconds
        for number in (5, 9, 10, 11)
    ]
    assert steps == sorted(steps, reverse=True)


def test_what_does_not_fit_is_not_chosen() -> None:
    free, plain = found(deep(), "1f1b", "chimera"), found(deep(), "1f1b")
    limit = free.prediction.peak_memory_bytes - 1
    assert plain.prediction.peak_memory_bytes <= limit
    tight = found(deep(), "1f1b", "chimera", request=replace(PIPELINE, memory_limit_bytes=limit))
    assert tight.schedule == "1f1b" or tight.prediction.peak_memory_bytes <= limit
    sliced = found(causal(), "1f1b", "terapipe", request=FEW)
    limit = found(causal(), "1f1b", request=FEW).prediction.peak_memory_bytes
    assert sliced.prediction.peak_memory_bytes > limit
    own = found(causal(), "1f1b", "terapipe", request=replace(FEW, memory_limit_bytes=limit))
    assert own.prediction.peak_memory_bytes <= limit


def test_models_that_slices_or_replicas_would_change_keep_their_schedule() -> None:
    """An MLP without positions has no slices; a single rank or an odd number has no two ways."""
    assert found(deep(), "1f1b", "terapipe").schedule == "1f1b"
    three = Request(6, forced=Forced(pp=3, num_microbatches=3))
    own = found(
        six(), "1f1b", "chimera", on=cluster(3, bytes_per_second=1e6, flops=1e6), request=three
    )
    assert own.schedule == "1f1b"


def attention_spec() -> Node:
    made = TensorSpec((2, 4, SEQ, 8), "float32", True)
    inputs = tuple(Ref(name) for name in "qkv")
    return Node("a", "op", "aten.scaled_dot_product_attention.default", inputs, outputs=(made,))


def test_an_attention_keeps_the_keys_so_far_of_every_slice_and_a_mask() -> None:
    """Of four slices of 8: keys of 8, 16, 24 and 32 positions where a whole one keeps 32."""
    slices = (8, 8, 8, 8)
    masks = 4 * 8 * (16 + 24 + 32)
    assert carried_bytes(attention_spec(), 1000.0, slices) == 1500.0 + masks
    assert carried_bytes(attention_spec(), 1000.0, slices, again=True) == 1000 * 48 / 32
    assert carried_bytes(attention_spec(), 1000.0, ()) == 0
    assert carried_bytes(replace(attention_spec(), op="aten.gelu.default"), 1000.0, slices) == 0


def test_the_memory_of_slices_is_more_than_that_of_whole_sequences_by_what_they_carry() -> None:
    own = found(causal(), "1f1b", "terapipe", request=FEW)
    sliced = evaluate(*causal(), own, SLOW)
    whole = evaluate(*causal(), replace(own, schedule="gpipe", slices=()), SLOW)
    pair, num_microbatches = 2 * 4 * SEQ * WIDTH, 2
    for stage, before, after in zip(own.stages, whole.stages, sliced.stages, strict=True):
        layers = sum("layers" in block.name for block in stage.blocks)
        more = layers * num_microbatches * carried_bytes(attention_spec(), pair, own.slices)
        assert after.memory_bytes["activations"] - before.memory_bytes["activations"] == (
            pytest.approx(more)
        )
