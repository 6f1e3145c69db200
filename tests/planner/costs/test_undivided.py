"""Sizes that an axis does not divide: the plan splits what it can and says what it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import plan_program
from autoparallel.target.load import load_target


def planned(n_head: int, vocab: int, seq: int = 15, d_model: int = 48) -> Plan:
    target = load_target(
        "examples/gpt.py",
        {"n_layer": 2, "d_model": d_model, "n_head": n_head, "seq": seq, "vocab": vocab},
    )
    options = PlanOptions(global_batch=4, seq=seq, forced=parse_parallel("tp=2"))
    program = capture_target(target, options)
    return plan_program(program, target, parse_cluster("cpu:2"), options)


def test_what_divides_is_split_and_the_rest_is_named() -> None:
    plan = planned(n_head=3, vocab=257)
    layouts = plan.stages[0].layouts
    for name in ("layers.0.mlp.up.weight", "layers.0.attention.qkv.weight", "head.weight"):
        assert layouts[name].outputs[0][0].is_shard
    assert plan.unsharded_ops == (
        "scaled_dot_product_attention of layers.0.attention is whole on tp=2, which does not "
        "divide 4×3×15×16, 4×3×15×16, 4×3×15×16",
    )
    assert loads(dumps(plan), "test").unsharded_ops == plan.unsharded_ops


@pytest.mark.parametrize("n_head", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_nothing_is_named_where_everything_divides(n_head: int) -> None:
    assert planned(n_head=n_head, vocab=256, seq=16, d_model=64).unsharded_ops == ()


class Flattened(nn.Module):
    """Its labels are flattened, and 6 rows cannot be split by 2 twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layer(self.table(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_axes_that_divide_an_op_each_alone_and_not_together_leave_it_whole_on_one() -> None:
    rows = torch.zeros(6, 8, dtype=torch.int64)
    plan = autoparallel.plan(
        Flattened(), (rows, rows), cluster="cpu:4", parallel="cp=2,dp=2", profile="analytic"
    )
    assert plan.stages[0].mesh.shape == (2, 2)
