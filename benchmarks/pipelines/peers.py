"""Our pipeline beside torch.distributed.pipelining's: same stages, same schedule, one group.

``python benchmarks/pipelines/peers.py [--schedules gpipe,1f1b] [--rounds N] [--json FILE]``.
A GPT is planned on four CPU ranks under each schedule. Both runtimes then train the stages of
that plan in the same four processes and the same gloo group, with the same weights and batch:
torch's schedule runs the stage modules that ours runs, or with ``--plain`` the model's own
modules of the same blocks. They take turns, and every turn is a
whole step from zeroed gradients to complete ones, without the optimizer, timed from a barrier
to the last rank's end. Losses and gradients of both are compared first. Printed: the ratio of
the median steps, ours to torch's, and the quartiles of the ratios of neighbouring turns; then the
same of the processor time that all ranks together took, which other programs move less.
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

from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target

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
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved-1f1b")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where our rank 1 spends time")
    parser.add_argument("--plain", action="store_true", help="the model's own modules for torch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in options.schedules.split(","):
        try:
            found[name] = measure(
                name, options.rounds, plain=options.plain, profile=options.profile
            )
        except AutoparallelError as error:
            print(f"{name:12s}  not run: {error.what}", flush=True)
            continue
        for what in ("step", "processor"):
            low, middle, high = found[name][f"{what}_quartiles"]
            print(
                f"{name:12s}  {what:9s}  ratio of medians {found[name][f'{what}_ratio']:.3f}"
                f"  (turns: {low:.3f} {middle:.3f} {high:.3f})",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def measure(schedule: str, rounds: int, *, plain: bool, profile: bool = False) -> dict[str, Any]:
    """Plans the GPT under ``schedule`` and lets both runtimes train it in turns."""
    peer = PEERS[schedule.removesuffix("-1f1b")]
    options = PlanOptions(
        global_batch=MICROBATCHES * ROWS,
        seq=64,
        micro_batch=ROWS,
        profile="analytic",
        forced=parse_parallel(f"pp={RANKS},schedule={schedule}"),
    )
    plan = make_plan(load_target(str(GPT), parse_settings(SETTINGS)), f"cpu:{RANKS}", options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        found: dict[str, dict[str, list[float]]] = launch(
            "peers:compare",
            {
                "plan_path": str(path),
                "peer": peer,
                "rounds": rounds,
                "plain": plain,
                "profile": profile,
            },
            num_processes=RANKS,
        )
    return {
        "step_ratio": ratio_of_medians(found["seconds"]),
        "step_quartiles": quartiles(found["seconds"]),
        "processor_ratio": ratio_of_medians(found["processor"]),
        "processor_quartiles": quartiles(found["processor"]),
        **found,
    }


def ratio_of_medians(turns: Mapping[str, Sequence[float]]) -> float:
    """Ours over theirs."""
    return statistics.median(turns["ours"]) / statistics.median(turns["theirs"])


def quartiles(turns: Mapping[str, Sequence[float]]) -> list[float]:
    """Of the ratios of neighbouring turns, ours over theirs."""
    pairs = zip(turns["ours"], turns["theirs"], strict=True)
    return statistics.quantiles([ours / theirs for ours, theirs in pairs], n=4)


def compare(
    worker: Worker, *, plan_path: str, peer: str, rounds: int, plain: bool, profile: bool
) -> dict[str, dict[str, list[float]]]:
    """On each rank: the seconds of every turn of both, and the processor's of all ranks."""
    import torch
    import torch.distributed as dist

    from autoparallel.planning.plan_files import load_job
    from autoparallel.runtime.launch.membership import join_as
    from autoparallel.training.worker import make_trainer

    plan, target = load_job(plan_path)
    device = join_as(worker, plan.cluster)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=0)
    generator = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES * ROWS, 64)
    batch = {
        name: torch.randint(0, 256, shape, generator=generator) for name in ("tokens", "targets")
    }
    modules = plain_modules(trainer, target) if plain else same_modules(trainer, target)
    theirs = torch_pipeline(trainer, modules, peer)
    inputs = trainer.batches.named(batch)

    has_loss = len(trainer.plan.stages) - 1 in trainer.model.stages

    def ours() -> float | None:
        loss = trainer.runner.backward(inputs)
        return float(loss) if has_loss else None

    steps: dict[str, Callable[[], float | None]] = {
        "ours": ours,
        "theirs": lambda: theirs(batch["tokens"], batch["targets"]),
    }
    loss, other = ours(), theirs(batch["tokens"], batch["targets"])
    assert loss is None or other is None or abs(loss / other - 1) < 1e-5, (loss, other)
    check_gradients(trainer, modules)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(2 * rounds + 4):
        name = ("ours", "theirs", "theirs", "ours")[turn % 4]
        worker.watchdog.progress(f"turn {turn}")
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        steps[name]()
        used = torch.tensor(time.process_time() - computed, dtype=torch.float64)
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        if turn >= 4:
            seconds[name].append(float(spent))
            processor[name].append(float(used))
    if profile:
        show_profile(worker.rank, steps)
    return {"seconds": seconds, "processor": processor}


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


def torch_pipeline(trainer: Any, modules: Mapping[int, Any], peer: str) -> Any:
    """torch's schedule over this rank's stage modules: a step, which returns the loss if it has it.

    The last module takes the targets too, and returns the loss, as one element, for torch
    concatenates what the last stage makes.
    """
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    count = len(trainer.plan.stages)
    stages = [
        PipelineStage(module, index, count, trainer.device) for index, module in modules.items()
    ]
    kind = getattr(schedules, peer)
    is_looped = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind(
        stages if is_looped else stages[0], MICROBATCHES, loss_fn=lambda loss, target: loss[0]
    )

    def step(tokens: Any, targets: Any) -> float | None:
        for module in modules.values():
            module.zero_grad()
        losses: list[Any] = []
        first = (tokens,) if 0 in modules else ()
        if count - 1 in modules:
            schedule.step(*first, target=targets, losses=losses, targets=targets)
            return float(torch.stack(losses).detach().mean())
        schedule.step(*first)
        return None

    return step


def same_modules(trainer: Any, target: Any) -> dict[int, Any]:
    """This rank's stages as our runtime runs them, with weights of their own."""
    from torch import nn

    from autoparallel.planning.capture import record_target
    from autoparallel.runtime.messages.communicator import ProcessCommunicator
    from autoparallel.runtime.parameters.initial_values import constants_of, fill_stages

    weights = record_target(target, 0)

    class Same(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            mesh = trainer.model.stages[index].device_mesh
            self.stage = trainer.model.make_stage(index, ProcessCommunicator(mesh), None)
            program = self.stage.program
            buffers = fill_stages([self.stage], weights, trainer.program)
            self.constants = constants_of(trainer.program, program, buffers, "cpu")
            received = [boundary.key for boundary in program.receives]
            self.executor = trainer.runner.executors[index]
            (self.entry,) = received or ["tokens"]
            (self.exit,) = [program.loss] if program.loss else [b.key for b in program.sends]

        def forward(self, x: Any, targets: Any = None) -> Any:
            # The targets of the whole batch are counted once a step; the batch stays the same.
            values = {**self.constants, **self.executor._counts[0], self.entry: x}
            if targets is not None:
                values["targets"] = targets
            value = self.stage(values)[self.exit]
            return value if value.dim() else value.unsqueeze(0)

        def gradients(self) -> dict[str, Any]:
            held = self.stage.by_name.items()
            return {n: p.master.grad if p.leaf is None else p.leaf.grad for n, p in held}

    return {index: Same(index) for index in trainer.model.stages}


def plain_modules(trainer: Any, target: Any) -> dict[int, Any]:
    """This rank's stages as pieces of the plain model."""
    from autoparallel.passes.initialization.deferred_init import plain_build
    from autoparallel.passes.local.stage_cut import stage_ranges

    model = plain_build(target.build_model, 0)
    blocks = trainer.program.blocks.blocks
    return {
        index: piece(model, [blocks[at].name for at in positions])
        for index, positions in enumerate(stage_ranges(trainer.plan))
        if index in trainer.model.stages
    }


def piece(model: Any, names: Sequence[str]) -> Any:
    """The blocks ``names`` of the GPT as a module, its parameters under the model's names."""
    from torch import arange, nn
    from torch.nn.functional import cross_entropy

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if "embedding" in names:
                self.tokens, self.positions = model.tokens, model.positions
            numbers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
            self.layers = nn.ModuleDict({str(n): model.layers[n] for n in numbers})
            if "head" in names:
                self.norm, self.head = model.norm, model.head

        def forward(self, x: Any, targets: Any = None) -> Any:
            if "embedding" in names:
                x = self.tokens(x) + self.positions(arange(x.shape[1], device=x.device))
            for layer in self.layers.values():
                x = layer(x)
            if "head" not in names:
                return x
            logits = self.head(self.norm(x))
            return cross_entropy(logits.flatten(0, 1), targets.flatten()).unsqueeze(0)

        def gradients(self) -> dict[str, Any]:
            return {name: p.grad for name, p in self.named_parameters()}

    return Piece()


def check_gradients(trainer: Any, modules: Mapping[int, Any]) -> None:
    """Both runtimes have the same gradients of the same parameters."""
    import torch

    seen = set()
    for module in modules.values():
        for name, gradient in module.gradients().items():
            mine = local(trainer.model.parameters[name].master.grad)
            assert torch.allclose(mine, local(gradient), rtol=1e-3, atol=1e-6), name
            seen.add(name)
    assert seen == set(trainer.model.parameters)


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
