"""What the literature says about parallel transformers, found again by the planner."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import inf

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from one_stage import plan
from plan_collectives import collectives
from torch import Tensor, nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Dtype, Program
from autoparallel.planner.costs.basis import DEFAULT, Basis, CostAssumptions
from autoparallel.planner.graph.layout import format_layout
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request
from examples.gpt import GPT, example_batch


class Layer(nn.Module):
    """A post-norm layer with query, key and value apart, as in BERT."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, hidden = x.shape
        shape = (rows, seq, self.num_heads, hidden // self.num_heads)
        q, k, v = (
            part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, seq, hidden)
        x = self.norm1(x + self.dense(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Layers on given hidden states, as Alpa's FlaxBertLayerCollection is tested."""

    def __init__(self, num_layers: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, num_heads) for _ in range(num_layers))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return F.mse_loss(hidden, labels)


@cache
def encoder(num_layers: int, hidden: int, seq: int) -> Program:
    with torch.device("meta"):
        model = Encoder(num_layers, hidden, hidden // 8)
        batch = {name: torch.empty(2, seq, hidden) for name in ("hidden", "labels")}
    return capture(model, batch)


@cache
def gpt(
    num_layers: int, hidden: int, num_heads: int, seq: int, vocab: int, dtype: Dtype = "bfloat16"
) -> Program:
    with torch.device("meta"):
        model = GPT(
            n_layer=num_layers, d_model=hidden, n_head=num_heads, seq=seq, vocab=vocab, tied=False
        )
    return capture(model, example_batch(2, seq), dtype=dtype)


XLA = Basis(assumptions=CostAssumptions(slowdown=inf, copies_states=False))
"""That of Alpa, of 2022, ran collectives between kernels and not beside them, without copies."""


def planned(program: Program, cluster: str, request: Request, basis: Basis = DEFAULT) -> Plan:
    return plan(program.graph, program.blocks, parse_cluster(cluster), request, basis=basis)


@pytest.mark.parametrize(
    ("num_layers", "tp"),
    [(2, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (3, 2)))],
)
def test_tensor_parallel_bert_takes_4l_minus_1_all_reduces(num_layers: int, tp: int) -> None:
    """Megatron-LM (Shoeybi et al. 2019, section 3); Alpa's test_auto_sharding_bert counts so.

    A layer's attention and its MLP each sum partial results once in the forward (g) and the
    gradient of what they read once in the backward (f): 4 all-reduces of B·S·H values. The
    first layer reads data, which need no gradient: 4L − 1 in all. Nothing else of that size
    is sent; a held split of a norm's or a bias' parameter is H values.
    """
    rows, seq, hidden = 4, 16, 32
    program = encoder(num_layers, hidden, seq)
    forced = Forced(tp=tp, num_microbatches=1, sequence_parallel=False)
    found = planned(program, f"{tp}xA100-80GB", Request(rows, forced=forced))
    sent = collectives(program.graph, program.blocks, found)
    whole = rows * seq * hidden * 4
    large = Counter((each.kind, each.direction) for each in sent if each.num_bytes >= whole)
    assert large == {
        ("all_reduce", "forward"): 2 * num_layers,
        ("all_reduce", "backward"): 2 * num_layers - 1,
    }
    assert all(each.num_bytes <= hidden * 4 for each in sent if each.num_bytes < whole)


def test_megatrons_splits_are_found_unasked() -> None:
    """Columns, then rows: with one row of 4096 positions there is no batch to split.

    Per layer the matmuls are 24·S·H² FLOPs; 8 H100 need not do them 8 times over. Weights
    split by columns, then rows move 2 sums of S·H values forward and 2 backward; gathering a
    split value between the two matmuls of the MLP would move 4·S·H. So query, key, value and
    up are split on what they make, S(0), dense and down on what they read, S(1), the heads and
    the inner width are split in between, and no activation is whole between them.
    """
    program = encoder(2, 2048, 4096)
    found = planned(program, "8xH100", Request(1, precision="bf16", forced=Forced(pp=1)))
    (stage,) = found.stages
    assert stage.mesh.axes == ("tp",)
    used = {
        module: format_layout(stage.layouts[node.name].inputs[1])
        for node in program.graph
        if node.op.startswith("aten.linear") and node.name in stage.layouts
        for module in [node.inputs[1].name.split(".")[-2]]
    }
    assert used == {
        "query": "S(0)",
        "key": "S(0)",
        "value": "S(0)",
        "dense": "S(1)",
        "up": "S(0)",
        "down": "S(1)",
    }
    attention = [node for node in program.graph if "scaled_dot_product" in node.op]
    gelu = [node for node in program.graph if "gelu" in node.op]
    for node, layout in ((attention[0], "S(1)"), (gelu[0], "S(2)")):
        name = program.blocks.template[node.name]
        assert format_layout(stage.layouts[name].outputs[0]) == layout


def test_gpt_with_fused_qkv_computes_as_megatron_does() -> None:
    """Forced tp: every part of the fused weight is used split by heads, proj by rows."""
    program = gpt(2, 2048, 16, 2048, 2048)
    forced = Forced(tp=4, num_microbatches=1)
    found = planned(program, "4xH100", Request(4, precision="bf16", forced=forced))
    layouts = found.stages[0].layouts
    used: dict[str, set[str]] = {}
    for node in program.graph:
        if node.op.startswith("aten.linear") and node.name in layouts:
            module = node.inputs[1].name.removeprefix("layers.0.").removesuffix(".weight")
            used.setdefault(module, set()).add(format_layout(layouts[node.name].inputs[1]))
    fused = next(name for name in used if "split" in name)
    assert used[fused] == {"S(0)"}
    assert used["attention.proj"] == {"S(1)"}
    assert used["mlp.up"] == {"S(0)"}
    assert used["mlp.down"] == {"S(1)"}


def test_zero_3_is_chosen_only_where_only_it_fits() -> None:
    """ZeRO (Rajbhandari et al. 2020): stage 3 sends half as much again as stages 1 and 2.

    So with room for stage 2 it must lose, and with less room than that it must be taken.
    """
    program = gpt(12, 256, 8, 64, 512)

    def found(zero: int | None, limit: int | None = None) -> Plan:
        forced = Forced(dp=4, zero=zero, recompute="none", num_microbatches=1)
        request = Request(4, precision="bf16", forced=forced, memory_limit_bytes=limit)
        return planned(program, "4xA100-40GB", request)

    need = [found(zero).prediction.peak_memory_bytes for zero in range(4)]
    assert need[0] > need[1] > need[2] > need[3]
    chosen = [found(None, limit).stages[0].zero for limit in (need[0], need[1], need[2], need[3])]
    assert chosen[0] <= 1
    assert chosen[1:] == [1, 2, 3]
    seconds = [found(zero).prediction.step_seconds for zero in range(4)]
    assert seconds[3] > seconds[2]


def test_pipeline_across_slow_links_and_tensors_inside_fast_ones() -> None:
    """Narayanan et al. 2021, section 5: tensor parallelism within a node, pipelines between.

    Two hosts of 4 V100 with 10 Gb/s between them. Per layer and micro-batch of one row of
    512 positions, H = 4096, in 2 bytes: a pipeline sends S·H = 4 MB over the slow link each
    way; tensor parallelism 4 sums of 4 MB; data parallelism the gradients of 12·H² weights,
    805 MB in 4 bytes, once per step of 4 rows. Inside a host 4 sums of 4 MB for each of the 4
    rows, 67 MB, are again less than the 805 MB of gradients. So: one stage per host, split
    by tensors. Under 1F1B, the schedule of their day: one that splits backwards fills the waits of
    more and smaller stages, and the second host then has two.
    """
    program = gpt(4, 4096, 32, 512, 2048, "float16")
    request = Request(4, precision="fp16", forced=Forced(schedule="1f1b"))
    found = planned(program, "2x4xV100@ethernet-10g", request)
    assert [(stage.devices, stage.mesh.axes, stage.mesh.shape) for stage in found.stages] == [
        ((0, 1, 2, 3), ("tp",), (4,)),
        ((4, 5, 6, 7), ("tp",), (4,)),
    ]


ALPA_SECONDS = {4: {1: 0.4328, 2: 0.5831, 4: 0.4455}, 8: {2: 0.5798, 4: 0.5033, 8: 0.4538}}
"""Measured step by devices and tensor-parallel degree: GPT, 8 layers, batch 8, 1024 positions,
H = 4096 and 5760, with recomputation, on one host of 8 V100-16GB.

Source: Zheng et al. 2022 (Alpa), artifact results_intra_ablation_ref.tsv.
"""


@pytest.mark.parametrize(
    ("num_devices", "hidden", "num_heads"),
    [(8, 5760, 40), pytest.param(4, 4096, 32, marks=pytest.mark.slow)],
)
def test_2d_meshes_lose_to_1d_meshes_on_one_nvlink_host(
    num_devices: int, hidden: int, num_heads: int
) -> None:
    """Of 6 links of a V100 all devices' rings use 6, four's 4 and a pair's one or two.

    Nothing is fitted to these rows: the rate is that of 4 V100s with all links between them.
    """
    program = gpt(8, hidden, num_heads, 1024, 25600, "float16")
    measured = ALPA_SECONDS[num_devices]
    predicted = {}
    for tp in measured:
        forced = Forced(dp=num_devices // tp, tp=tp, pp=1, recompute="full", num_microbatches=1)
        request = Request(8, precision="fp16", forced=forced)
        found = planned(program, f"{num_devices}xV100-16GB", request, XLA)
        predicted[tp] = found.prediction.step_seconds
    assert sorted(measured, key=predicted.__getitem__)[-1] == 2
    flat = [tp for tp in predicted if tp in (1, num_devices)]
    assert max(predicted[tp] for tp in flat) < min(
        predicted[tp] for tp in predicted if tp not in flat
    )
    for tp, seconds in measured.items():
        assert predicted[tp] == pytest.approx(seconds, rel=0.1)
