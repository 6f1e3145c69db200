"""Our pipeline beside torch.distributed.pipelining's: same stages, same schedule, one group.

``python benchmarks/pipelines/peers.py [--schedules gpipe,1f1b] [--rounds N] [--json FILE]``.
A GPT is planned on four CPU ranks under each schedule. Both runtimes then train the stages of
that plan in the same four processes and the same gloo group: ours by the plan, torch's with
the modules of the same blocks, same weights, same batch. They take turns, and every turn is a
whole step from zeroed gradients to complete ones, without the optimizer, timed from a barrier
to the last rank's end. Losses and gradients of both are compared first. Printed: the ratio of
the median steps, ours to torch's, and the quartiles of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoparallel.options import parse_parallel, parse_settings
from autoparallel.plan_io import save_plan
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planning import PlanOptions, make_plan
from autoparallel.runtime.launch import launch
from autoparallel.runtime.process import Worker
from autoparallel.targets import load_target

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"
SETTINGS = ("n_layer=8", "d_model=128", "n_head=4", "seq=64")
RANKS, MICROBATCHES, ROWS = 4, 8, 2
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Our schedules that torch has, and what it calls them."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where our rank 1 spends time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in options.schedules.split(","):
        try:
            found[name] = measure(name, options.rounds, profile=options.profile)
        except AutoparallelError as error:
            print(f"{name:12s}  not run: {error.what}", flush=True)
            continue
        low, middle, high = found[name]["ratio_quartiles"]
        print(
            f"{name:12s}  ratio of medians {found[name]['ratio']:.3f}"
            f"  (turns: {low:.3f} {middle:.3f} {high:.3f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def measure(schedule: str, rounds: int, *, profile: bool = False) -> dict[str, Any]:
    """Plans the GPT under ``schedule`` and lets both runtimes train it in turns."""
    options = PlanOptions(
        global_batch=MICROBATCHES * ROWS, seq=64, micro_batch=ROWS, profile="analytic",
        forced=parse_parallel(f"pp={RANKS},schedule={schedule}"),
    )  # fmt: skip
    plan = make_plan(load_target(str(GPT), parse_settings(SETTINGS)), f"cpu:{RANKS}", options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        seconds: dict[str, list[float]] = launch(
            "peers:compare",
            {"plan_path": str(path), "peer": PEERS[schedule], "rounds": rounds, "profile": profile},
            num_processes=RANKS,
        )
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "ratio": medians["ours"] / medians["theirs"],
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "seconds": seconds,
    }


def compare(
    worker: Worker, *, plan_path: str, peer: str, rounds: int, profile: bool
) -> dict[str, list[float]]:
    """On each rank: the seconds of every turn of both runtimes."""
    import torch
    import torch.distributed as dist

    from autoparallel.runtime.trainer import join
    from autoparallel.worker import load_job, make_trainer

    plan, target = load_job(plan_path)
    device = join("cpu", worker.local_rank)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=0)
    generator = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES * ROWS, 64)
    batch = {
        name: torch.randint(0, 256, shape, generator=generator)
        for name in ("tokens", "targets")
    }  # fmt: skip
    modules, theirs = torch_pipeline(trainer, target, peer)
    inputs = trainer.inputs(batch)

    def ours() -> float | None:
        return float(trainer.backward(inputs))

    steps: dict[str, Callable[[], float | None]] = {
        "ours": ours,
        "theirs": lambda: theirs(batch["tokens"], batch["targets"]),
    }
    loss, other = ours(), theirs(batch["tokens"], batch["targets"])
    assert other is None or abs(loss / other - 1) < 1e-5, (loss, other)
    check_gradients(trainer, modules)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(2 * rounds + 4):
        name = ("ours", "theirs", "theirs", "ours")[turn % 4]
        worker.watchdog.progress(f"turn {turn}")
        dist.barrier()
        began = time.perf_counter()
        steps[name]()
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if turn >= 4:
            seconds[name].append(float(spent))
    if profile:
        show_profile(worker.rank, steps)
    return seconds


def show_profile(rank: int, steps: Mapping[str, Callable[[], float | None]]) -> None:
    """Prints, on rank 1, which functions ten steps of each runtime spend their own time in."""
    import cProfile
    import pstats

    for name, step in steps.items():
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10):
            step()
        profiler.disable()
        if rank == 1:
            sys.stderr.write(f"{name}\n")
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(22)


def torch_pipeline(trainer: Any, target: Any, peer: str) -> tuple[dict[int, Any], Any]:
    """torch's schedule over the same blocks: (this rank's modules by stage, its step)."""
    import torch.nn.functional as F  # noqa: N812
    from torch.distributed.pipelining import PipelineStage, schedules

    from autoparallel.passes.deferred_init import plain_build
    from autoparallel.passes.stage_cut import stage_ranges

    plan = trainer.plan
    model = plain_build(target.build_model, 0)
    blocks = trainer.program.blocks.blocks
    modules, stages = {}, []
    for index, (stage, positions) in enumerate(zip(plan.stages, stage_ranges(plan), strict=True)):
        if trainer.rank in stage.devices:
            modules[index] = piece(model, [blocks[at].name for at in positions])
            stages.append(PipelineStage(modules[index], index, len(plan.stages), trainer.device))

    def loss_fn(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    kind = getattr(schedules, peer)
    is_looped = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind(stages if is_looped else stages[0], MICROBATCHES, loss_fn=loss_fn)

    def step(tokens: Any, targets: Any) -> float | None:
        import torch

        for module in modules.values():
            module.zero_grad()
        losses: list[Any] = []
        first = (tokens,) if 0 in modules else ()
        if len(plan.stages) - 1 in modules:
            schedule.step(*first, target=targets, losses=losses)
            return float(torch.stack(losses).detach().mean())
        schedule.step(*first)
        return None

    return modules, step


def piece(model: Any, names: Sequence[str]) -> Any:
    """The blocks ``names`` of the GPT as a module of one argument, under the model's names."""
    from torch import arange, nn

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if "embedding" in names:
                self.tokens, self.positions = model.tokens, model.positions
            numbers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
            self.layers = nn.ModuleDict({str(n): model.layers[n] for n in numbers})
            if "head" in names:
                self.norm, self.head = model.norm, model.head

        def forward(self, x: Any) -> Any:
            if "embedding" in names:
                x = self.tokens(x) + self.positions(arange(x.shape[1], device=x.device))
            for layer in self.layers.values():
                x = layer(x)
            return self.head(self.norm(x)) if "head" in names else x

    return Piece()


def check_gradients(trainer: Any, modules: Mapping[int, Any]) -> None:
    """Both runtimes have the same gradients of the same parameters."""
    import torch

    seen = set()
    for module in modules.values():
        for name, parameter in module.named_parameters():
            mine = trainer.parameters[name].master.grad.to_local()
            assert torch.allclose(mine, parameter.grad, rtol=1e-3, atol=1e-6), name
            seen.add(name)
    assert seen == set(trainer.parameters)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
