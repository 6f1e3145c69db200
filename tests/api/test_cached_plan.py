"""A reused plan equals a new one; keys hold everything that a plan follows from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from random_cases import Case, random_case
from small_graphs import cluster, mlp

from autoparallel.cache.cached_plan import plan_key, reuse_or_search
from autoparallel.cache.codec import Codec
from autoparallel.cache.plan_cache import Cache, UnkeyedError, digest, graph_digest
from autoparallel.cache.store import SqliteStore
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import Profile
from autoparallel.placers.placement import learned_pipelines
from autoparallel.planner.costs.basis import DEFAULT, Basis
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.find_plan import plan
from autoparallel.planner.graph.graph import OpRule
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.goal import Goal
from autoparallel.planner.requests.pins import parse_pin
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.report.page import confidence


@dataclass
class Planning:
    """Plans of cases with a cache in ``folder``, as one command after the other."""

    folder: Path
    code: str = "here"
    num_searches: int = 0

    def plan(self, case: Case, **changes: Any) -> tuple[Plan, Cache]:
        request = replace(case.request, **changes)
        on = case.cluster
        return self.kept(replace(case, request=request), plan, case.graph, case.blocks, on, request)

    def kept(self, case: Case, search: Any, *arguments: Any) -> tuple[Plan, Cache]:
        """What ``search`` finds or an earlier one found, and the cache of this command."""

        def counted() -> Plan:
            self.num_searches += 1
            found: Plan = search(*arguments)
            return found

        shelf = self.shelf()
        cache = Cache(shelf, self.code)
        try:
            found = reuse_or_search(
                cache,
                case.graph,
                case.blocks,
                case.cluster,
                case.request,
                basis=DEFAULT,
                search=counted,
            )
        finally:
            shelf.close()
        return found, cache

    def shelf(self) -> SqliteStore:
        return SqliteStore(self.folder / "plans.sqlite", "here", 10**9)


@pytest.fixture
def planning(tmp_path: Path) -> Planning:
    return Planning(tmp_path)


def small(**asked: Any) -> Case:
    graph, blocks = mlp(2, rows=8)
    quick = Forced(num_microbatches=2, zero=0, recompute="none")
    request = Request(**{"global_batch": 32, "time_limit_seconds": 600.0, "forced": quick, **asked})
    return Case(0, graph, blocks, cluster(2), request, None)


def text(found: Plan) -> str:
    """A plan as its file says it, but for whether it was reused."""
    return dumps(replace(found, solver=replace(found.solver, is_reused=False)))


@pytest.mark.parametrize(
    "seed",
    [None, *range(403, 406), *(pytest.param(n, marks=pytest.mark.slow) for n in (401, 402))],
)
def test_the_same_request_again_needs_no_search(seed: int | None, planning: Planning) -> None:
    case = small() if seed is None else random_case(seed)
    first, made = planning.plan(case)
    again, reused = planning.plan(case)
    assert planning.num_searches == 1
    assert text(again) == text(first)
    assert (made.made["plan"], made.reused["plan"]) == (1, 0)
    assert (reused.made["plan"], reused.reused["plan"]) == (0, 1)


def test_a_reused_plan_says_whose_seconds_it_tells(planning: Planning) -> None:
    first, _ = planning.plan(small())
    again, _ = planning.plan(small())
    assert (first.solver.is_reused, again.solver.is_reused) == (False, True)
    assert again.solver.seconds == first.solver.seconds
    assert "the plan is reused" in report(again)
    assert "reused" not in report(first)


def report(found: Plan) -> str:
    from rich.console import Console

    console = Console(width=300)
    with console.capture() as captured:
        console.print(confidence(found))
    return captured.get()


ASKED: tuple[dict[str, Any], ...] = (
    {"global_batch": 64},
    {"seq": 8},
    {"precision": "bf16"},
    {"float32_ops": "autocast"},
    {"optimizer": "sgd"},
    {"memory_limit_bytes": 10**9},
    {"microbatch_size": 2},
    {"forced": Forced(zero=0)},
    {"top": 4},
    {"gap": 0.02},
    {"tolerance": 0.1},
    {"pins": (parse_pin("layers.*=R@dp"),)},
    {"stage_at": ("layers.1",)},
    {"max_tp": 1},
    {"features": Features(frozenset({"zero3"}))},
    {"goal": Goal("memory")},
    {"target": "other.py"},
    {"settings": {"layers": 2}},
    {"solver": "cbc"},
    {"intra_op": "ilp"},
    {"gradient_dtype": "compute"},
    {"offload": "optimizer"},
)
"""A change of every field of a request but two: with a ``placer`` no plan is kept, and a kept plan
was found within any time limit."""


def key_of(case: Case, basis: Basis = DEFAULT) -> str:
    return plan_key(case.graph, case.blocks, case.cluster, case.request, basis)


def test_every_option_every_cluster_and_every_graph_has_a_key_of_its_own() -> None:
    assert {name for asked in ASKED for name in asked} == {
        each.name for each in fields(Request) if each.name not in ("placer", "time_limit_seconds")
    }
    assert key_of(small(time_limit_seconds=601.0)) == key_of(small())
    case = small()
    device = replace(case.cluster.hosts[0].device, memory_bytes=10**9)
    host = replace(case.cluster.hosts[0], device=device)
    others = (
        replace(case, cluster=cluster(4)),
        replace(case, cluster=replace(case.cluster, name="other")),
        replace(case, cluster=replace(case.cluster, hosts=(host,))),
        replace(case, graph=replace(case.graph, batch_dims={})),
    )
    keys = [key_of(each) for each in (case, *(small(**asked) for asked in ASKED), *others)]
    assert len(set(keys)) == len(keys)
    assert key_of(small()) == keys[0]


def test_features_have_one_key_in_whatever_order_they_were_denied() -> None:
    """The order of a set differs from process to process, and so would its text."""
    names = ("zero3", "tp", "pp", "zero2", "full")
    one, other = (Features(frozenset(each)) for each in (names, names[::-1]))
    assert key_of(small(features=one)) == key_of(small(features=other))


def test_the_profile_and_its_use_are_in_the_key() -> None:
    profile = Profile(Environment("a CPU", "", "2.11", 1), {})
    bases = (
        DEFAULT,
        Basis(profile),
        Basis(profile, "measured"),
        Basis(profile, "analytic"),
        Basis(replace(profile, rest=(1.1, 1.0))),
        Basis(replace(profile, update="Lion")),
        Basis(profile, only="measured"),
    )
    assert len({key_of(small(), basis) for basis in bases}) == len(bases)


def test_the_key_knows_every_field_of_a_basis() -> None:
    """A new field must come into ``plan_key``; ``asked`` only records what is asked."""
    names = {each.name for each in fields(Basis)}
    assert names == {"profile", "mode", "asked", "only", "assumptions"}


def test_other_code_finds_nothing(planning: Planning) -> None:
    planning.plan(small())
    planning.code = "other code"
    planning.plan(small())
    assert planning.num_searches == 2


@pytest.mark.parametrize("value", [b"no value", Codec(()).encode("no plan"), Codec(()).encode(3)])
def test_damaged_and_foreign_values_are_made_again(value: bytes, planning: Planning) -> None:
    first, _ = planning.plan(small())
    shelf = planning.shelf()
    shelf.put(digest("here", "plan", key_of(small())), value)
    shelf.close()
    again, cache = planning.plan(small())
    assert planning.num_searches == 2
    assert cache.faults["damaged"] == 1
    assert again.stages == first.stages
    assert planning.plan(small())[1].reused["plan"] == 1


@pytest.mark.parametrize("reason", ["its time limit", "Ctrl-C"])
def test_plans_of_searches_that_were_ended_are_not_kept(reason: str, planning: Planning) -> None:
    case = small()
    found = plan(case.graph, case.blocks, case.cluster, case.request)
    ended = replace(found, solver=replace(found.solver, stopped=reason))
    assert planning.kept(case, lambda: ended)[0] == ended
    again, _ = planning.plan(case)
    assert planning.num_searches == 2
    assert not again.solver.is_reused


@pytest.mark.parametrize("asked", [{"placer": learned_pipelines}, {"goal": Goal("memory")}])
def test_plans_of_placers_and_of_several_searches_are_not_kept(
    asked: dict[str, Any], planning: Planning
) -> None:
    for _ in range(2):
        _, cache = planning.plan(small(), **asked)
        assert not cache.made + cache.reused + cache.faults
    assert planning.num_searches == 2


def test_that_nothing_fits_is_kept_with_its_text_until_the_question_changes(
    planning: Planning,
) -> None:
    texts = []
    for limit, seconds, searches in ((10, 600, 1), (10, 600, 1), (11, 600, 2), (10, 9, 3)):
        asked = {"memory_limit_bytes": limit, "time_limit_seconds": float(seconds)}
        with pytest.raises(InfeasibleError, match="AP301") as raised:
            planning.plan(small(), **asked)
        assert planning.num_searches == searches
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_other_errors_are_not_kept(planning: Planning) -> None:
    def search() -> None:
        raise InfeasibleError("AP302", "no plan meets the deadline")

    for _ in range(2):
        with pytest.raises(InfeasibleError):
            planning.kept(small(), search)
    assert planning.num_searches == 2


def test_ops_with_functions_of_the_users_are_not_kept(planning: Planning) -> None:
    case = small()
    node = next(node for node in case.graph.nodes if node.kind == "op")
    ruled = replace(node, rule=OpRule("* -> *", flops=lambda *shapes: 1.0))
    nodes = tuple(ruled if each is node else each for each in case.graph.nodes)
    other = replace(case, graph=replace(case.graph, nodes=nodes))
    with pytest.raises(UnkeyedError):
        graph_digest(other.graph, case.blocks)
    found = plan(case.graph, case.blocks, case.cluster, case.request)
    for _ in range(2):
        _, cache = planning.kept(other, lambda: found)
        assert cache.faults["functions"] == 1
    assert planning.num_searches == 2


def test_a_graphs_digest_sees_every_field_but_the_source() -> None:
    case = small()
    own = graph_digest(case.graph, case.blocks)
    node = case.graph.nodes[-1]

    def changed(**fields_: Any) -> str:
        nodes = (*case.graph.nodes[:-1], replace(node, **fields_))
        return graph_digest(replace(case.graph, nodes=nodes), case.blocks)

    spec = replace(node.outputs[0], dtype="float16")
    assert own not in (
        changed(args=(*node.args, 1)),
        changed(outputs=(spec, *node.outputs[1:])),
        changed(op="aten.other.default"),
        changed(kwargs={"a": 1}),
        changed(module="elsewhere"),
    )
    assert changed(source="other.py:1") == own
    assert graph_digest(replace(case.graph, batch_dims={}), case.blocks) != own
    assert digest(1, 2) != digest(12)
