"""The interpreter and the exchange on real processes, against one process in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_processes
from torch import Tensor

from autoparallel.cost_model.simulator.actions import COMPUTE, Schedule, parse_table
from autoparallel.passes.local.stage_cut import Boundary
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import (
    INVARIANT,
    Layout,
    Mesh,
    local_region,
    region_slices,
    shard,
    whole_region,
)
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.messages.exchange import Exchange
from autoparallel.runtime.messages.ordered_channels import Lanes
from autoparallel.runtime.step.pipeline import Hooks, PipelineRunner

CPU = torch.device("cpu")
WIDTH, ROWS, NUM_LAYERS = 6, 4, 4


@dataclass(frozen=True)
class Place:
    mesh: Mesh
    devices: tuple[int, ...]


def place(first: int, dp: int, tp: int) -> Place:
    return Place(Mesh(("dp", "tp"), (dp, tp)), tuple(range(first, first + dp * tp)))


def layers(count: int = NUM_LAYERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(count)
    ]


def full_batch(num_microbatches: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_microbatches * ROWS, WIDTH)
    return {"x": torch.randn(shape, generator=generator, dtype=torch.float64)}


def loss_of(x: Tensor, h: Tensor) -> Tensor:
    return (h * x.flip(1)).sin().mean()


class ToyExecutor:
    """Some layers of a chain whose every layer also takes the first layer's result (a skip).

    Each layer is ``h = tanh(h @ w) + 0.5 * first``. Rows are split over dp by the batch's
    layout; ranks along tp compute the same.
    """

    def __init__(
        self, stage: int, places: tuple[Place, ...], rank: int, num_microbatches: int
    ) -> None:
        self.stage, self.places = stage, places
        self.num_microbatches = num_microbatches
        per_stage = NUM_LAYERS // len(places)
        self.own = range(stage * per_stage, (stage + 1) * per_stage)
        self.weights = layers()
        mesh = places[stage].mesh
        self.dp = mesh.coordinates(places[stage].devices.index(rank))[0]
        self.dp_size = mesh.shape[0]
        self.num_copies = mesh.size // self.dp_size
        self.lasts: list[tuple[int, bool]] = []
        self.finished = 0

    def begin_step(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch
        self.flight: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self.losses: dict[int, Tensor] = {}
        for weight in self.weights:
            weight.grad = None

    def forward(self, m: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        leaves = {key: value.requires_grad_() for key, value in received.items()}
        rows = ROWS // self.dp_size
        start = m * ROWS + self.dp * rows
        x = self.batch["x"][start : start + rows]
        h, first = leaves.get("h", x), leaves.get("first")
        for index in self.own:
            h = (h @ self.weights[index]).tanh()
            if first is None:
                first = h
            else:
                h = h + 0.5 * first
        outputs = {"h": h, "first": first}
        if self.stage == len(self.places) - 1:
            self.losses[m] = outputs["loss"] = loss_of(x, h)
        self.flight[m] = (leaves, outputs)
        return {key: value.detach() for key, value in outputs.items() if key != "loss"}

    def backward(self, m: int, gradients: Mapping[str, Tensor], *, last: bool):
        self.lasts.append((m, last))
        leaves, outputs = self.flight.pop(m)
        if "loss" in outputs:
            (outputs["loss"] / self.num_microbatches).backward()
        else:
            keys = list(gradients)
            torch.autograd.backward([outputs[k] for k in keys], [gradients[k] for k in keys])
        return {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}

    def loss(self, m: int) -> Tensor | None:
        """This rank's part: the ranks along tp share the loss that each of them has."""
        return self.losses[m] / self.num_copies if m in self.losses else None

    def finish_step(self) -> None:
        self.finished += 1


def boundaries_of(places: tuple[Place, ...]) -> list[Boundary]:
    """``h`` to the next stage, ``first`` from stage 0 to every later one."""
    spec = TensorSpec((ROWS, WIDTH), "float64", requires_grad=True)

    def layout(stage: int) -> Layout:
        return (shard(0), INVARIANT)

    pairs = [("h", s, s + 1) for s in range(len(places) - 1)]
    pairs += [("first", 0, s) for s in range(1, len(places))]
    return [Boundary(k, s, t, spec, layout(s), layout(t)) for k, s, t in pairs]


def run_chain(name: str, places: tuple[Place, ...], num_microbatches: int, pair_groups: bool):
    """Two steps on one rank: (losses, gradients by layer, record of lasts, timings)."""
    rank = dist.get_rank()
    stage = next((s for s, p in enumerate(places) if rank in p.devices), None)
    schedule = build_schedule(name, len(places), num_microbatches)
    exchange = Exchange(
        [boundaries_of(places)],
        schedule=schedule,
        stages=places,
        rank=rank,
        device=CPU,
        lanes=Lanes(CPU, pair_groups),
    )
    executor = None if stage is None else ToyExecutor(stage, places, rank, num_microbatches)
    executors = {} if stage is None else {stage: executor}
    updates: list[int] = []
    runner = PipelineRunner(
        schedule,
        executors,
        exchange,
        hooks=Hooks(update=lambda: updates.append(1), clock=perf_counter),
    )
    batch = full_batch(num_microbatches)
    losses = [runner.step(batch).item() for _ in range(2)]
    if executor is None:
        return losses, {}, [], (), 0
    gradients = {i: executor.weights[i].grad.tolist() for i in executor.own}
    kinds = [t.action for t in runner.timings]
    assert all(t.start_seconds <= t.ready_seconds <= t.end_seconds for t in runner.timings)
    assert executor.finished == len(updates)
    return losses, gradients, executor.lasts[-num_microbatches:], tuple(kinds), len(updates)


def reference(num_microbatches: int) -> tuple[float, list[Tensor]]:
    weights = layers()
    x = full_batch(num_microbatches)["x"]
    total = torch.zeros((), dtype=torch.float64)
    for rows in x.split(ROWS):
        h, first = rows, None
        for weight in weights:
            h = (h @ weight).tanh()
            if first is None:
                first = h
            else:
                h = h + 0.5 * first
        total = total + loss_of(rows, h) / num_microbatches
    total.backward()
    return total.item(), [weight.grad for weight in weights]


def check_chain(
    name: str, places: tuple[Place, ...], num_microbatches: int, *, idle: int = 0, pairs=False
) -> None:
    num_ranks = sum(len(p.devices) for p in places) + idle
    results = run_processes(num_ranks, run_chain, name, places, num_microbatches, pairs)
    loss, gradients = reference(num_microbatches)
    schedule = build_schedule(name, len(places), num_microbatches)
    for losses, *_ in results:
        assert losses == pytest.approx([loss, loss], rel=1e-12)
    for stage, stage_place in enumerate(places):
        row = schedule.table[stage]
        backwards = [a.microbatch for a in row if a.kind == "B"]
        for device in stage_place.devices:
            _, _, lasts, actions, updates = results[device]
            assert lasts == [(m, m == backwards[-1]) for m in backwards]
            assert actions == row
            assert updates == 2
        for layer in results[stage_place.devices[0]][1]:
            tp = stage_place.mesh.shape[1]
            parts = [
                torch.tensor(results[d][1][layer], dtype=torch.float64) for d in stage_place.devices
            ]
            for group in range(tp):
                total = sum(parts[group::tp])
                assert torch.allclose(total, gradients[layer], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_four_stages_with_a_skip_connection_equal_one_process(name):
    check_chain(name, tuple(place(s, 1, 1) for s in range(4)), 6)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_two_data_ranks_before_two_tensor_ranks_equal_one_process(name):
    check_chain(name, (place(0, 2, 1), place(2, 1, 2)), 4)


def test_one_stage_runs_through_the_same_interpreter():
    check_chain("1f1b", (place(0, 1, 1),), 3)


def test_fewer_microbatches_than_stages_and_a_rank_left_idle():
    check_chain("1f1b", tuple(place(s, 1, 1) for s in range(2)), 1, idle=1)


def test_groups_per_pair_of_ranks_give_the_same():
    """What NCCL runs on: batched messages in a group per ordered pair."""
    check_chain("1f1b", (place(0, 2, 1), place(2, 1, 2)), 4, pairs=True)


def whole(key: str, m: int, spec: TensorSpec) -> Tensor:
    """A global value that tells its key and micro-batch apart from every other."""
    count = torch.arange(spec.numel, dtype=torch.float64) + 1000 * m + 17 * len(key)
    if spec.dtype == "bool":
        return ((count.long() * 7) % 3 == 0).reshape(spec.shape)
    return count.to(getattr(torch, spec.dtype)).reshape(spec.shape)


def part(value: Tensor, layout: Layout, where: Place, rank: int) -> Tensor:
    coordinates = where.mesh.coordinates(where.devices.index(rank))
    region = local_region(value.shape, layout, where.mesh, coordinates)
    return value[region_slices(region, whole_region(value.shape))]


F64 = TensorSpec((4, 6), "float64", requires_grad=True)
CROSSING = {
    "dp to tp": (place(0, 2, 1), place(2, 1, 2), (shard(0), INVARIANT), (INVARIANT, shard(1))),
    "tp to dp": (place(0, 1, 2), place(2, 2, 1), (INVARIANT, shard(1)), (shard(0), INVARIANT)),
    "whole to split": (
        place(0, 1, 2),
        place(2, 2, 1),
        (INVARIANT, INVARIANT),
        (shard(0), INVARIANT),
    ),
    "split to whole": (
        place(0, 2, 1),
        place(2, 1, 2),
        (shard(1), INVARIANT),
        (INVARIANT, INVARIANT),
    ),
    "one to three": (place(0, 1, 1), place(1, 3, 1), (INVARIANT, INVARIANT), (shard(1), INVARIANT)),
}


def cross(case: str, pair_groups: bool) -> None:
    """Three micro-batches of three values each way, not in the order in which they are needed;
    every received box is checked here."""
    source, target, source_layout, target_layout = CROSSING[case]
    rank = dist.get_rank()
    mask = TensorSpec((4, 6), "bool")
    crossing = [
        Boundary("h", 0, 1, F64, source_layout, target_layout),
        Boundary("mask", 0, 1, mask, source_layout, target_layout),
        Boundary("scale", 0, 1, TensorSpec((), "int64"), (INVARIANT,) * 2, (INVARIANT,) * 2),
    ]
    table = parse_table(
        "0SEND_F2 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0RECV_B2\n"
        "1RECV_F0 1RECV_F1 1RECV_F2 1SEND_B2 1SEND_B0 1SEND_B1"
    )
    exchange = Exchange(
        [crossing],
        schedule=Schedule("crossing", 3, (0, 1), table),
        stages=(source, target),
        rank=rank,
        device=CPU,
        lanes=Lanes(CPU, pair_groups),
    )
    order = [2, 0, 1]
    if rank in source.devices:
        for m in order:
            exchange.send(
                "forward",
                0,
                m,
                {
                    b.key: part(whole(b.key, m, b.spec), b.source_layout, source, rank)
                    for b in crossing
                },
            )
        for m in range(3):
            exchange.post("backward", 0, m)
        for m in order:
            gradients = exchange.receive("backward", 0, m)
            expected = part(whole("gradient", m, F64), source_layout, source, rank)
            assert list(gradients) == ["h"]
            assert torch.equal(gradients["h"], expected)
    else:
        for m in range(3):
            exchange.post("forward", 1, m)
        for m in order:
            received = exchange.receive("forward", 1, m)
            for b in crossing:
                expected = part(whole(b.key, m, b.spec), b.target_layout, target, rank)
                assert torch.equal(received[b.key], expected), (b.key, m)
            gradient = part(whole("gradient", m, F64), target_layout, target, rank)
            exchange.send("backward", 1, m, {"h": gradient})
    exchange.finish()


@pytest.mark.parametrize("case", CROSSING)
def test_stages_of_different_meshes_exchange_exactly_their_boxes(case):
    source, target, *_ = CROSSING[case]
    run_processes(len(source.devices) + len(target.devices), cross, case, False)


def test_boxes_cross_in_groups_per_pair_as_well():
    run_processes(4, cross, "dp to tp", True)


def sum_of_consumers() -> None:
    """Stage 0's value goes to both later stages; a gradient that nobody has is zero."""
    rank = dist.get_rank()
    places = tuple(place(s, 1, 1) for s in range(3))
    layout = (INVARIANT, INVARIANT)
    crossing = [Boundary(k, 0, t, F64, layout, layout) for k in ("a", "b") for t in (1, 2)]
    exchange = Exchange(
        [crossing],
        schedule=build_schedule("gpipe", 3, 1, edges=((0, 1), (0, 2))),
        stages=places,
        rank=rank,
        device=CPU,
    )
    if rank:
        exchange.send("backward", rank, 0, {"a": torch.full((4, 6), float(rank)).double()})
    else:
        exchange.post("backward", 0, 0)
        gradients = exchange.receive("backward", 0, 0)
        assert torch.equal(gradients["a"], torch.full((4, 6), 3.0).double())
        assert torch.equal(gradients["b"], torch.zeros(4, 6).double())
    exchange.finish()


def test_gradients_of_several_consumers_are_summed():
    run_processes(3, sum_of_consumers)


def send_wrong_shape() -> None:
    layout = (INVARIANT, INVARIANT)
    places = (place(0, 1, 1), place(1, 1, 1))
    exchange = Exchange(
        [[Boundary("h", 0, 1, F64, layout, layout)]],
        schedule=build_schedule("gpipe", 2, 1),
        stages=places,
        rank=dist.get_rank(),
        device=CPU,
    )
    if dist.get_rank() == 0:
        exchange.send("forward", 0, 0, {"h": torch.zeros(4, 5).double()})


def test_a_value_of_another_shape_is_refused_before_it_is_sent():
    with pytest.raises(RankError, match=r"stage 0 computed \(4, 5\) torch.float64 for 'h'"):
        run_processes(2, send_wrong_shape)


ONE = Schedule("one", 1, (0,), parse_table("0F0 0B0 0REDUCE 0STEP"))


def test_progress_names_stage_microbatch_and_what_is_waited_for():
    told: list[str] = []
    places = (place(0, 1, 1),)
    runner = PipelineRunner(
        ONE,
        {0: ToyExecutor(0, places, 0, 1)},
        Exchange([[]], schedule=ONE, stages=places, rank=0, device=CPU),
        hooks=Hooks(progress=lambda what, waits_for: told.append(what)),
    )
    runner.step(full_batch(1))
    assert told[:2] == ["beginning a step", "0F0: computing (stage 0, micro-batch 0)"]
    assert told[3] == "0REDUCE: completing the gradients of stage 0"
    assert runner.timings == ()


def test_an_inference_schedule_keeps_no_graph():
    seen: list[bool] = []

    class Watching(ToyExecutor):
        def forward(self, m, received):
            seen.append(torch.is_grad_enabled())
            return super().forward(m, received)

    places = (place(0, 1, 1),)
    runner = PipelineRunner(
        build_schedule("inference", 1, 2),
        {0: Watching(0, places, 0, 2)},
        Exchange([[]], schedule=ONE, stages=places, rank=0, device=CPU),
    )
    assert runner.step(full_batch(2)).item() == pytest.approx(reference(2)[0])
    assert seen == [False, False]
    assert {action.kind for action in build_schedule("inference", 1, 2).table[0]} <= COMPUTE
