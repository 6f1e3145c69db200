"""Asynchronous schedules on real processes, held to one process that makes the same updates.

The truth (``runtime.verify.reference``) takes the papers' rules, knows no action table, and
runs the plain model; losses, the last gradients and the weights after three steps agree to 1e-9 in
float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from one_device import loss_of
from processes import run_processes
from test_verification import captured, target

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.tracing.counter_random import batch_dims
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.variants.asynchronous import check_asynchronous
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import (
    Reference,
    reference_split,
    run_replay,
    update_rule,
)
from autoparallel.runtime.verify.verify import Verification, verify

SEQ, GLOBAL_BATCH, STEPS = 16, 16, 3
SCHEDULES = ("pipedream", "pipedream-2bw", "ampnet")
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    parallel: str
    optimizer: str = "adamw"
    model: str = "gpt"
    ignored: bool = False
    """Whether rows have different numbers of targets."""

    def __str__(self) -> str:
        words = (self.model, self.parallel, self.optimizer, "ignoring" if self.ignored else "")
        return " ".join(word for word in words if word)


TWO = (
    *(Case(f"pp=2,schedule={schedule},microbatches=8", "momentum") for schedule in SCHEDULES),
    Case("pp=2,schedule=pipedream,microbatches=4,recompute=full", model="dropout"),
    Case("pp=2,schedule=pipedream-2bw,microbatches=8,recompute=selective"),
    Case("pp=2,schedule=ampnet,microbatches=8", ignored=True),
)
MORE = (
    *(Case(f"pp=2,schedule={schedule},microbatches=8") for schedule in SCHEDULES),
    Case("pp=2,schedule=ampnet,microbatches=4", model="dropout"),
    *(Case(f"pp=2,schedule={each},microbatches=8", ignored=True) for each in SCHEDULES[:2]),
)
FOUR = (
    *(
        Case(f"pp=4,schedule={schedule},microbatches=16", optimizer)
        for schedule in SCHEDULES
        for optimizer in OPTIMIZERS
    ),
    *(Case(f"pp=2,dp=2,schedule={schedule},microbatches=8") for schedule in SCHEDULES),
    *(Case(f"pp=2,tp=2,schedule={schedule},microbatches=4") for schedule in SCHEDULES[:2]),
    *(
        Case("pp=2,tp=2,schedule=ampnet,microbatches=4", optimizer, model="llama")
        for optimizer in OPTIMIZERS
    ),
)


@cache
def planned(case: Case) -> str:
    forced = parse_parallel(case.parallel)
    devices = (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)
    _, program = captured(case.model, "fp32")
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=forced)
    cluster = parse_cluster(f"cpu:{devices}")
    return dumps(plan_program(program, target(case.model), cluster, options))


def batches(case: Case) -> list[dict[str, torch.Tensor]]:
    graph = captured(case.model, "fp64")[1].graph.with_batch_size(GLOBAL_BATCH)
    found = [random_batch(graph, seed=step) for step in range(STEPS)]
    for batch in found if case.ignored else ():
        for row in range(GLOBAL_BATCH):
            batch["targets"][row, : row % SEQ] = -100
    return found


def verified(case: Case, text: str, weights: str = "") -> Verification:
    """On a rank: the plan's run against its schedule's rule, or against that of ``weights``."""
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(case.model, "fp64")
    build = OPTIMIZERS[case.optimizer]
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"), build=build)
    found = target(case.model)
    rule = update_rule(trainer.model.planned)
    assert rule is not None
    if weights:
        rule = replace(rule, weights=weights)

    def replayed() -> Reference:
        model = plain_build(found.build_model, 0).double()
        with promote_to_float64():
            return run_replay(
                model,
                batches(case),
                rule,
                loss=loss_of(found, program),
                build_optimizer=build,
                split=partial(reference_split, trainer.model.planned),
                random_dims=batch_dims(program.graph),
            )

    return verify(trainer, batches(case), replayed)


def verify_all(cases: list[tuple[Case, str]]) -> list[Verification]:
    return [verified(case, text) for case, text in cases]


@cache
def results(cases: tuple[Case, ...], num_ranks: int) -> dict[Case, Verification]:
    plans = [(case, planned(case)) for case in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


def check(found: Verification) -> None:
    assert found.passed, found.failures[:5]
    assert found.tolerance == 1e-9
    assert {d.quantity for d in found.differences} == {"loss", "gradient", "weight"}


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_stages_make_the_updates_of_the_paper(case: Case) -> None:
    check(results(TWO, 2)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_two_stages_make_the_updates_of_the_paper_in_more_cases(case: Case) -> None:
    check(results(MORE, 2)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_make_the_updates_of_the_paper(case: Case) -> None:
    check(results(FOUR, 4)[case])


def passed_by_other_rules(text: str) -> list[bool]:
    return [
        verified(Case("", "momentum"), text, other).passed
        for other in ("double-buffered", "latest")
    ]


def test_no_other_rule_makes_the_same_updates() -> None:
    text = planned(Case("pp=2,schedule=pipedream,microbatches=8"))
    assert run_processes(2, passed_by_other_rules, text)[0] == [False, False]


def refused(texts: list[str]) -> list[str]:
    deferred, program = captured("gpt", "fp32")
    codes = []
    for text in texts:
        with pytest.raises(UsageError) as caught:
            Trainer(program, loads(text, "test"), deferred, device=torch.device("cpu"))
        codes.append(caught.value.code)
    return codes


def test_a_plan_that_was_changed_to_what_cannot_run_is_refused_when_it_starts() -> None:
    plan: Plan = loads(planned(Case("pp=2,schedule=ampnet,microbatches=8")))
    first, last = plan.stages
    blocks = tuple(replace(block, recompute="full") for block in last.blocks)
    changed = ((replace(first, zero=1), last), (first, replace(last, blocks=blocks)))
    texts = [dumps(replace(plan, stages=stages)) for stages in changed]
    assert run_processes(2, refused, texts) == [["AP158"] * 2] * 2


def test_the_newest_weights_are_refused_where_a_backward_reads_copies_of_them() -> None:
    """The parts of a projection that is fused and split are exchanged in the forward."""
    program = captured("gpt", "fp32")[1]
    data = loads(planned(Case("pp=2,dp=2,schedule=ampnet,microbatches=8")))
    check_asynchronous(data, program.graph, program.blocks)
    split = replace(
        loads(planned(Case("pp=2,tp=2,schedule=pipedream,microbatches=4"))), schedule="ampnet"
    )
    with pytest.raises(UsageError, match=r"attention\.qkv\.weight gathered in stage 0") as caught:
        check_asynchronous(split, program.graph, program.blocks)
    assert caught.value.code == "AP158"


@pytest.mark.parametrize(
    ("model", "parallel", "what"),
    [
        ("gpt", "schedule=pipedream", "needs a pipeline of several ranks"),
        ("gpt", "pp=2,zero=1,schedule=pipedream-2bw", "zero=1"),
        ("gpt", "pp=2,recompute=full,schedule=ampnet", "recompute=full"),
        ("gpt", "pp=2,tp=2,schedule=ampnet,microbatches=4", "weight gathered in stage 0"),
        ("gpt-tied", "pp=2,schedule=pipedream", "tokens.weight in stages 0 and 1"),
    ],
)
def test_what_asynchronous_schedules_cannot_run_is_refused(
    model: str, parallel: str, what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        planned(Case(parallel, model=model))
    assert caught.value.code == "AP158"


def test_the_versions_of_the_weights_are_in_the_predicted_memory() -> None:
    """Of four stages, PipeDream's stage s keeps 4 - s versions, 2BW's two, AMPNet's one."""
    extra = {
        "1f1b": (0, 0, 0, 0),
        "pipedream": (3, 2, 1, 0),
        "pipedream-2bw": (1, 1, 1, 1),
        "ampnet": (0, 0, 0, 0),
    }
    for schedule, copies in extra.items():
        plan = loads(planned(Case(f"pp=4,schedule={schedule},microbatches=16")))
        for stage, count in zip(plan.stages, copies, strict=True):
            memory = stage.prediction.memory_bytes
            assert memory.get("versions", 0) == count * memory["parameters"]
        assert plan.prediction.peak_memory_bytes == max(
            sum(stage.prediction.memory_bytes.values()) for stage in plan.stages
        )
