"""One rank of the runtime benchmark: torch and autoparallel take turns, step by step.

Started by ``run.py`` through torchrun, with a case as JSON. Rank 0 prints, as JSON, the seconds of
every turn of each way to train, and the processor time of all ranks.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import autoparallel

LEARNING_RATE = 1e-4
WARM_UP = 3
COLUMNS, ROWS = ("query", "key", "value", "up"), ("proj", "down")
PARALLEL = {
    "ddp": "dp={},zero=0,microbatches=1,recompute=none",
    "fsdp": "dp={},zero=3,microbatches=1,recompute=none",
    "tp": "tp={},microbatches=1,recompute=none",
}
"""What autoparallel is asked for beside each of torch's."""

Step = Callable[[], Tensor]


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = make_batch(case)
    steps: dict[str, Step] = {
        "torch": torch_step(case, batch),
        "loop": loop_step(case, batch),
        "Step": our_step(case, batch),
    }
    torch.set_num_threads(1)
    check(steps)
    result = take_turns(steps, case["turns"])
    if case["profile"]:
        show_profile(steps)
    if dist.get_rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps(result)}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def make_batch(case: Mapping[str, Any]) -> dict[str, Tensor]:
    """The global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (case["rows"] * dist.get_world_size(), case["seq"])
    return {
        name: torch.randint(0, 256, shape, generator=generator) for name in ("tokens", "targets")
    }


def build(case: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return GPT(**case["model"], seq=case["seq"])


def torch_step(case: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Step:
    """What a torch user writes; the loss is that of the rank's own rows."""
    model, world = build(case), dist.get_world_size()
    if case["peer"] == "tp":
        split_layers(model)
        own = dict(batch)
    else:
        rows = slice(dist.get_rank() * case["rows"], (dist.get_rank() + 1) * case["rows"])
        own = {name: value[rows] for name, value in batch.items()}
    if case["peer"] == "ddp":
        model = DistributedDataParallel(model)
    if case["peer"] == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
    return loop(model, make_optimizer(model.parameters()), own)


def split_layers(model: nn.Module) -> None:
    """Heads and the inside of each MLP over all ranks, as Megatron-LM splits them.

    Embeddings are split by width and the head by class, as the planner has it.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {name: ColwiseParallel() for name in COLUMNS} | {
        name: RowwiseParallel() for name in ROWS
    }
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)  # type: ignore[arg-type]
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, dict.fromkeys(("tokens", "positions", "head"), whole))


def parallel_model(case: Mapping[str, Any], batch: Mapping[str, Tensor]) -> nn.Module:
    world = dist.get_world_size()
    made: nn.Module = autoparallel.parallelize(
        build(case),
        example_batch=dict(batch),
        parallel=PARALLEL[case["peer"]].format(world),
        profile="analytic",
        pin=list(pins()) if case["peer"] == "tp" else None,
    )
    return made


def pins() -> Iterator[str]:
    """The split of ``split_layers``, for the planner: what that leaves whole is whole."""
    for name in ("norm", "layers.*.norm1", "layers.*.norm2"):
        yield f"{name}.weight=R@tp"
    yield from ("tokens.weight=S(1)@tp", "positions.weight=S(1)@tp", "head.weight=S(0)@tp")
    for name in ("norm", "layers.*.norm1", "layers.*.norm2", "layers.*.proj", "layers.*.down"):
        yield f"{name}.bias=R@tp"
    for names, dim in ((COLUMNS, 0), (ROWS, 1)):
        for name in names:
            yield f"layers.*.{name}.weight=S({dim})@tp"


def loop_step(case: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Step:
    model = parallel_model(case, batch)
    return loop(model, make_optimizer(model.parameters()), batch)


def our_step(case: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Step:
    step = autoparallel.Step(parallel_model(case, batch))
    for group in step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return lambda: step(batch)


def loop(model: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor]) -> Step:
    """The ordinary training step."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def make_optimizer(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """Fused AdamW; a group for each layout, as fused kernels take tensors of one layout."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "placements", None), []).append(parameter)
    return AdamW([{"params": each} for each in groups.values()], lr=LEARNING_RATE, fused=True)


def check(steps: Mapping[str, Step]) -> None:
    """All train alike: the mean of the ranks' losses is the same, in each of the first steps."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        for _ in range(WARM_UP):
            loss = step().detach().to(torch.float64).clone()
            dist.all_reduce(loss)
            found[name].append(float(loss) / dist.get_world_size())
    expected = found["torch"]
    for name, losses in found.items():
        for one, other in zip(losses, expected, strict=True):
            assert abs(one / other - 1) < 1e-4, (name, losses, expected)


def take_turns(steps: Mapping[str, Step], turns: int) -> dict[str, dict[str, list[float]]]:
    """From a barrier to the end of the last rank, in an order that rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began, computed = time.perf_counter(), time.process_time()
            steps[name]()
            used = torch.tensor(time.process_time() - computed, dtype=torch.float64)
            spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            dist.all_reduce(used)
            seconds[name].append(float(spent))
            processor[name].append(float(used))
    return {"seconds": seconds, "processor": processor}


def show_profile(steps: Mapping[str, Step]) -> None:
    """Prints, on rank 0, in which functions each way spends ten steps."""
    for name, step in steps.items():
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10):
            step()
        profiler.disable()
        if dist.get_rank() == 0:
            sys.stderr.write(f"{name}\n")
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
