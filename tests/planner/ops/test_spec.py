"""Records of ops: no fact is left out, and an op is added by its record alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from commands import run_python
from script_exports import check_text, exported, run
from structure import ROOT

from autoparallel.cost_model.profile.arguments import build_call
from autoparallel.passes.backward.recomputing import COSTLY
from autoparallel.passes.backward.weight_gradients import HALVES
from autoparallel.planner.costs.op_case import op_case
from autoparallel.planner.graph.graph import Node, OpRule, Ref, TensorSpec
from autoparallel.planner.ops import saved, work
from autoparallel.planner.ops.case import packet
from autoparallel.planner.ops.catalog import BY_NAME, SPECS, spec_named, spec_of
from autoparallel.planner.ops.spec import OpSpec
from autoparallel.testing import check_op

MODEL = ROOT / "tests" / "models" / "added_op.py"
RECORD = """
from autoparallel.planner.ops.catalog import BY_NAME
from autoparallel.planner.ops.elementwise import BINARY
from autoparallel.planner.ops.spec import named

for spec in named(BINARY, "logaddexp", keeps="both", result="either"):
    BY_NAME[spec.name] = spec
"""
OP = "aten.logaddexp.default"


@pytest.fixture
def added() -> Iterator[None]:
    """The record, until the end of a test."""
    exec(RECORD, {})
    yield
    del BY_NAME["logaddexp"]


def test_no_fact_of_a_record_has_a_default() -> None:
    assert all(each.default is MISSING for each in fields(OpSpec))
    assert all(each.default_factory is MISSING for each in fields(OpSpec))
    given = {each.name: getattr(SPECS[0], each.name) for each in fields(OpSpec)}
    for name in given:
        with pytest.raises(TypeError, match=name):
            OpSpec(**{key: value for key, value in given.items() if key != name})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_record_is_complete_and_its_facts_agree(spec: OpSpec) -> None:
    for name, hint in get_type_hints(OpSpec).items():
        if get_origin(hint) is not None and all(isinstance(each, str) for each in get_args(hint)):
            assert getattr(spec, name) in get_args(hint), name
    assert BY_NAME[spec.name] is spec
    assert (spec.keeps != "others") or len(spec.factors) >= 2
    assert spec.product is None or spec.family == "matmul"
    assert spec.weight_gradient is None or spec.family in ("matmul", "conv", "embedding")
    assert not spec.is_sized or spec.local is not None or spec.name == "squeeze"
    assert re.fullmatch(r"|a \S+ b|(\.|F\.)[a-z_{}]+\((|\*|\d)\)", spec.script), spec.script


def test_what_torch_executes_agrees_with_the_records() -> None:
    by_name = {op: spec_named(packet(str(op))) for op in (*COSTLY, *HALVES)}
    assert all(by_name[op].is_costly for op in COSTLY if "scaled_dot" not in str(op))
    late = {spec.name for spec in SPECS if spec.weight_gradient is not None}
    assert late == {packet(str(op)) for op in HALVES if isinstance(op, torch._ops.OpOverload)}


def test_a_registered_op_has_a_record_with_the_facts_of_its_rule() -> None:
    node = Node("n", "op", "user.project.default", rule=OpRule("b h, h o -> b o", None, None))
    spec = spec_of(node)
    assert spec.rule is not None
    assert (spec.rule.annotation, spec.keeps) == ("b h, h o -> b o", "inputs")
    sized = spec_of(replace(node, rule=OpRule("b -> b", None, lambda shape: 8 * shape[0])))
    inputs = (TensorSpec((4,), "float32", True),)
    assert (sized.keeps, sized.kept_bytes(node, inputs, inputs)) == ("nothing", 32)


def test_a_record_of_a_few_lines_is_all_that_a_new_op_needs(added: None) -> None:
    assert len(RECORD.splitlines()) <= 20
    whole = [torch.rand(4, 6, dtype=torch.float64) for _ in range(2)]
    assert set(check_op(torch.ops.aten.logaddexp.default, *whole).split) == {"d0", "d1"}
    spec: Any = TensorSpec((4, 6), "float32", True)
    node = Node("either", "op", OP, (Ref("x"), Ref("y")), outputs=(spec,))
    assert saved(node) == (Ref("x"), Ref("y"), Ref("either"))
    price = work(node, (spec, spec), node.outputs)
    case = op_case(node, (spec, spec), node.outputs, price)
    assert case is not None
    args, kwargs = build_call(case, "cpu").prepare()
    assert build_call(case, "cpu").op(*args, **kwargs).shape == (4, 6)


def test_an_added_op_is_split_recomputed_and_verified(tmp_path: Path) -> None:
    target, plan = tmp_path / "model.py", str(tmp_path / "plan.json")
    target.write_text(MODEL.read_text() + RECORD)
    forced = ["--cluster", "cpu:2", "--parallel", "tp=2,recompute=full", "--global-batch", "8"]
    made = run_python("-m", "autoparallel", "plan", str(target), *forced, "-o", plan)
    assert made.returncode == 0, made.stderr
    assert "logaddexp" not in made.stdout  # reports name ops without a rule
    checked = run_python("-m", "autoparallel", "verify", plan, "--trust")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_an_added_op_is_exported(tmp_path: Path, added: None) -> None:
    out, _ = exported(tmp_path, str(MODEL), "tp=2,recompute=selective")
    text = check_text(out)
    assert "either = torch.logaddexp(" in text
    losses, _ = run(out, "tp=2")
    assert losses[-1] < losses[0]
