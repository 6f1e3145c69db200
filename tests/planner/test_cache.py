"""A cached search gives the plan of one without; keys hold all that a value follows from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import Case, random_case
from small_graphs import cluster, mlp

from autoparallel.planner.cache.cache import Cache, UnkeyedError, digest, graph_digest
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.graph import OpRule
from autoparallel.planner.plan_file import dumps
from autoparallel.planner.pricing.basis import Asked, Basis
from autoparallel.planner.pricing.choices import Restriction
from autoparallel.planner.pricing.prices import Prices
from autoparallel.planner.pricing.stage_model import StageModel
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.cached_search import CachedIntraOp, cache_for
from autoparallel.planner.search.search import plan


@dataclass
class Memory:
    """A shelf in memory."""

    values: dict[str, bytes] = field(default_factory=dict)
    untold: dict[str, bytes] = field(default_factory=dict)

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.untold[key] = value

    def news(self) -> Mapping[str, bytes]:
        found, self.untold = self.untold, {}
        return found


def planned(case: Case, cache: Cache) -> str:
    """The plan as its file says it, without the seconds that it took; or why there is none."""
    try:
        found = plan(case.graph, case.blocks, case.cluster, case.request, basis=Basis(cache=cache))
    except AutoparallelError as error:
        return str(error)
    return dumps(replace(found, solver=replace(found.solver, seconds={})))


def asked(case: Case, **changes: Any) -> Case:
    return replace(case, request=replace(case.request, **changes))


FLAGS: tuple[Callable[[Case], Case], ...] = (
    lambda case: case,
    lambda case: asked(case, top=1),
    lambda case: asked(case, global_batch=2 * case.request.global_batch),
    lambda case: asked(case, optimizer="sgd"),
    lambda case: asked(case, precision="bf16"),
    lambda case: asked(case, microbatch_size=2),
    lambda case: asked(case, forced=Forced(zero=0)),
    lambda case: asked(case, forced=Forced(recompute="full")),
    lambda case: asked(case, forced=Forced(schedule="gpipe")),
    lambda case: asked(case, forced=Forced(pp=2)),
    lambda case: case.limited(3_000),
    lambda case: case.limited(30_000),
)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 400),
    st.lists(st.integers(0, len(FLAGS) - 1), min_size=1, max_size=2),
    st.integers(0, len(FLAGS) - 1),
)
def test_a_cached_plan_equals_an_uncached_one(seed: int, before: list[int], flag: int) -> None:
    """Whatever was planned before: the plan, or the error, is the same to the last bit."""
    case = asked(random_case(seed, mixed=False), time_limit_seconds=600.0)
    cache = Cache(Memory(), "here")
    for each in before:
        planned(FLAGS[each](case), cache)
    wanted = FLAGS[flag](case)
    assert planned(wanted, cache) == planned(wanted, Cache())


def big() -> Case:
    graph, blocks = mlp(2, rows=8)
    on = cluster(2)
    return Case(0, graph, blocks, on, Request(32, time_limit_seconds=600.0), None)


def solved_again(case: Case) -> Counter[str]:
    """What a second search of the same does not find on the shelf that the first one filled."""
    shelf = Memory()
    first, second = Cache(shelf, "here"), Cache(shelf, "here")
    assert planned(case, first) == planned(case, second)
    assert sum(first.made.values()) > 0
    for what in ("solutions", "programs"):
        assert second.reused[what] == first.made[what] + first.reused[what]
    return +second.made


@pytest.mark.parametrize("seed", [None, *range(401, 406), 321])
def test_the_same_again_solves_nothing(seed: int | None) -> None:
    """Of 321, where memory binds, the plan has unequal shares of the batch."""
    case = big() if seed is None else random_case(seed)
    case = case.limited(1228) if seed == 321 else case
    assert not solved_again(asked(case, time_limit_seconds=600.0))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_same_again_solves_nothing_where_memory_binds(share: float) -> None:
    """Programs and prices of bytes are then sought too."""
    case = asked(random_case(402), time_limit_seconds=600.0)
    found = plan(case.graph, case.blocks, case.cluster, case.request)
    assert not solved_again(case.limited(int(share * found.prediction.peak_memory_bytes)))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_again_solves_nothing_in_any_process(
    processes: int,
) -> None:
    """What another process solved is kept too."""
    graph, blocks = mlp(5, rows=8, width=512, inner=2048)
    on = cluster(6, num_hosts=2)
    request = Request(16, processes=processes, time_limit_seconds=600.0)
    assert not solved_again(Case(0, graph, blocks, on, request, None))


def test_what_a_flag_does_not_change_is_reused() -> None:
    """More candidates need no other tables; a memory limit changes no table and no bound."""
    for change in (asked(big(), top=9), big().limited(10**6)):
        shelf = Memory()
        planned(big(), Cache(shelf, "here"))
        again = Cache(shelf, "here")
        planned(change, again)
        assert again.reused["tables"]
        assert not again.made["tables"]
        assert again.reused["solutions"]


def test_other_code_finds_nothing() -> None:
    shelf = Memory()
    one, other = Cache(shelf, "of one version"), Cache(shelf, "of another")
    planned(big(), one)
    planned(big(), other)
    assert other.made == one.made
    assert other.reused == one.reused


def test_damaged_values_are_made_again() -> None:
    shelf = Memory()
    whole = planned(big(), Cache(shelf, "here"))
    shelf.values = {key: value[:-3] for key, value in shelf.values.items()}
    again = Cache(shelf, "here")
    assert planned(big(), again) == whole
    assert again.faults["damaged"] == len(shelf.values)


def test_nothing_is_kept_where_every_price_must_be_heard_of() -> None:
    case, cache = big(), Cache(Memory(), "here")
    basis = Basis(cache=cache, asked=Asked({}))
    assert cache_for(case.graph, case.blocks, case.request, basis).shelf is None


def test_ops_with_functions_of_the_users_are_not_kept() -> None:
    case, cache = big(), Cache(Memory(), "here")
    node = next(node for node in case.graph.nodes if node.kind == "op")
    ruled = replace(node, rule=OpRule("* -> *", flops=lambda *shapes: 1.0))
    nodes = tuple(ruled if each is node else each for each in case.graph.nodes)
    graph = replace(case.graph, nodes=nodes)
    with pytest.raises(UnkeyedError):
        graph_digest(graph, case.blocks)
    assert cache_for(graph, case.blocks, case.request, Basis(cache=cache)).shelf is None
    assert cache.faults["functions"] == 1


def test_a_graphs_digest_sees_every_field_but_the_source() -> None:
    case = big()
    own = graph_digest(case.graph, case.blocks)
    node = case.graph.nodes[-1]

    def changed(**fields_: Any) -> str:
        nodes = (*case.graph.nodes[:-1], replace(node, **fields_))
        return graph_digest(replace(case.graph, nodes=nodes), case.blocks)

    spec = replace(node.outputs[0], dtype="float16")
    assert own not in (
        changed(args=(*node.args, 1)), changed(outputs=(spec, *node.outputs[1:])),
        changed(op="aten.other.default"), changed(kwargs={"a": 1}), changed(module="elsewhere"),
    )  # fmt: skip
    assert changed(source="other.py:1") == own
    assert graph_digest(replace(case.graph, batch_dims={}), case.blocks) != own
    assert digest(1, 2) != digest(12)


def test_the_keys_know_every_field_that_a_solver_has() -> None:
    """A new field must come into ``cached_search``'s keys, or be known not to matter."""
    names = {owner: tuple(f.name for f in fields(owner)) for owner in (
        Prices, StageModel, Restriction, CachedIntraOp,
    )}  # fmt: skip
    assert {name for name in names[Prices] if not name.startswith("_")} == {
        "mesh", "groups", "speed", "device", "policy", "precision", "optimizer", "rules",
        "profile", "cluster", "assumptions",
        # what tells only who asks, or keeps what was asked:
        "ranks", "cache", "converted", "asked", "only",
        # what only says which device is the slowest:
        "own",
    }  # fmt: skip
    public = [name for name in names[StageModel] if not name.startswith("_")]
    assert set(public) == {"structure", "prices", "restriction", "link", "merge"}
    public = [name for name in names[CachedIntraOp] if not name.startswith("_")]
    assert set(public) == {"model", "limits", "effort", "pools", "answers", "cache"}
    assert {f.name for f in fields(Request)} >= {"precision", "optimizer"}
