"""Ranks that live on and train one random model after the other.

``Pool`` starts the ranks of a process group and gives each the same trial; a trial that ends
otherwise than on all ranks alike, or not in time, ends them, and the next one starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.fuzz.draw import Model, draw_model
from benchmarks.fuzz.plans import MICROBATCHES, Plan, draw_plan, with_long

TRIAL_SECONDS = 90.0
GRACE_SECONDS = 6.0
"""For so long the other ranks are waited for once one has failed."""
MOST_DRAWS = 40
PRODUCT = re.compile(r"^(?!.*site-packages/torch).*/(?=(?:api|cost_model|passes|planner|runtime)/)")
"""What stands before the path of a file of the product, installed or not."""
BRIEF_SECONDS = 0.003
"""For so long each of a CPU's rates is measured, once in a process; plans need no exact rates."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, the plan it is trained by, and the seed of its numbers."""

    seed: int
    model: Model
    plan: Plan


@dataclass(frozen=True, slots=True)
class Result:
    """How a trial ended: "equal", "refused", "different", "crash" or "void", and details."""

    kind: str
    code: str = ""
    text: str = ""


def draw_trial(seed: int, num_ranks: int, *, is_long: bool = False) -> Trial:
    """Return the trial of a seed: the first drawn model that plain PyTorch trains. With ``is_long``
    its plan has options for long sequences."""

    from benchmarks.fuzz.training import is_finite, train_plain

    for attempt in range(MOST_DRAWS):
        model = draw_model(f"{seed}.{attempt}")
        trial = Trial(seed, model, draw_plan(f"{seed}.{attempt}", model, num_ranks))
        try:
            if is_finite(train_plain(model, trial.plan, seed)):
                plan = with_long(f"{seed}.{attempt}", trial.plan) if is_long else trial.plan
                return replace(trial, plan=plan)
        except Exception:  # noqa: BLE001 - whatever plain PyTorch says of a drawn model
            continue
    raise ValueError(f"no model of seed {seed} can be trained")


def asked_again(trial: Trial, code: str) -> Trial | None:
    """Return a trial whose plan asks for nothing that the model cannot have; None where the
    refusal was of something else.

    Micro-batches where rows meet (AP125) become one; fewer rows than micro-batches (AP124) and
    more stages than blocks (AP128) become the planner's own choice.
    """
    parallel = trial.plan.parallel
    if parallel is None or code not in ("AP124", "AP125", "AP128"):
        return None
    whole = MICROBATCHES.sub("", parallel) + ",microbatches=1"
    other = None if code != "AP125" or whole == parallel else whole
    return replace(trial, plan=replace(trial.plan, parallel=other))


def run_trial(trial: Trial) -> Result:
    """Return how a trial ends on this rank, asked again where its plan asks for too much."""
    found = _run_once(trial)
    while found.kind == "refused":
        other = asked_again(trial, found.code)
        if other is None:
            break
        trial, found = other, _run_once(other)
    return found


def _run_once(trial: Trial) -> Result:
    from autoparallel import AutoparallelError
    from benchmarks.fuzz.training import allowances, difference, train_parallel, train_plain

    try:
        plain = train_plain(trial.model, trial.plan, trial.seed)
        allowed = allowances(trial.model, trial.plan, trial.seed, plain)
    except Exception as error:  # noqa: BLE001 - a model that was cut down may be none
        return Result("void", "", f"{type(error).__name__}: {error}")
    try:
        parallel = train_parallel(trial.model, trial.plan, trial.seed)
    except AutoparallelError as error:
        code = str(getattr(error, "code", "") or "")
        is_refusal = bool(code) and code != "AP999" and not code.startswith("AP8")
        return Result("refused" if is_refusal else "crash", code, str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return Result("crash", f"{type(error).__name__} {_place(error)}", traceback.format_exc())
    off = difference(plain, parallel, allowed)
    return Result("different" if off else "equal", "", off)


def _place(error: BaseException) -> str:
    """Return the innermost line of autoparallel in an error's traceback, as file:line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if PRODUCT.search(frame.filename)]
    if not own:
        return "outside autoparallel"
    return f"{PRODUCT.split(own[-1].filename)[-1]}:{own[-1].lineno}"


def _rank(end: Connection, folder: str, rank: int, num_ranks: int) -> None:
    log = os.open(f"{folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        OMP_NUM_THREADS="1",
        AUTOPARALLEL_MEASURE_SECONDS="0",
        AUTOPARALLEL_CACHE=f"{folder}/cache",
    )
    import torch
    import torch.distributed as dist

    from autoparallel.cost_model.cluster import detect

    torch.set_num_threads(1)
    detect._PATIENCE_SECONDS = BRIEF_SECONDS
    detect._measure_cpu = cache(detect._measure_cpu)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TRIAL_SECONDS),
    )
    while True:
        trial = end.recv()
        if trial is None:
            return
        end.send(run_trial(trial))


class Pool:
    """The ranks of one process group, started when they are needed."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_starts = 0
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._folder = ""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, trial: Trial) -> Result:
        """Return how a trial ends on all ranks."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send(trial)
        results = self._collect()
        found = list(results.values())
        alike = len(found) == self.num_ranks and len({(r.kind, r.code) for r in found}) == 1
        if alike and found[0].kind != "crash":
            return found[0]
        if len(found) == self.num_ranks and {r.kind for r in found} == {"equal", "different"}:
            return next(r for r in found if r.kind == "different")
        text = self._logs() if len(found) < self.num_ranks else ""
        self.stop()
        return _worst(found, self.num_ranks, text)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "torch",
                "torch.distributed.tensor",
                "torch.export._trace",
                "benchmarks.fuzz.training",
                "autoparallel.adoption.module",
                "autoparallel.adoption.step",
                "autoparallel.planning.plan",
                "autoparallel.planning.objectives",
                "autoparallel.adoption.join",
                "autoparallel.adoption.parallelize",
                "autoparallel.passes.capture.capture_model",
            ]
        )
        self._folder = tempfile.mkdtemp(prefix="fuzz-")
        self.num_starts += 1
        for rank in range(self.num_ranks):
            end, child = context.Pipe()
            process = context.Process(
                target=_rank, args=(child, self._folder, rank, self.num_ranks), daemon=True
            )
            process.start()
            child.close()
            self._ends.append(end)
            self._processes.append(process)

    def _collect(self) -> dict[int, Result]:
        results: dict[int, Result] = {}
        dead: set[int] = set()
        deadline = time.monotonic() + TRIAL_SECONDS
        while len(results) + len(dead) < self.num_ranks:
            pending = [e for r, e in enumerate(self._ends) if r not in results and r not in dead]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for end in ready:
                assert isinstance(end, Connection)
                rank = self._ends.index(end)
                try:
                    results[rank] = end.recv()
                    failed = results[rank].kind in ("crash", "refused")
                except (EOFError, ConnectionResetError):
                    dead.add(rank)
                    failed = True
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results

    def _logs(self) -> str:
        logs = [Path(self._folder, f"rank{rank}.log") for rank in range(self.num_ranks)]
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())

    def stop(self) -> None:
        """End the ranks, which the next trial starts again."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()
        self._ends, self._processes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _worst(found: list[Result], num_ranks: int, text: str) -> Result:
    """Return the result that says most of a trial that ended in different ways, or not at all."""
    crashes = [each for each in found if each.kind == "crash"]
    rest = [each for each in found if each.kind not in ("crash", "equal")]
    if crashes:
        return crashes[0]
    if len(found) < num_ranks:
        code = next(iter(re.findall(r"AP8\d\d", text)), "no answer")
        first = rest[0].text if rest else ""
        return Result(
            "crash", code, f"{num_ranks - len(found)} ranks gave no answer; {first}\n{text}"
        )
    return Result(
        "crash", "ranks differ", " / ".join(f"{r.kind} {r.code} {r.text[:300]}" for r in found)
    )
