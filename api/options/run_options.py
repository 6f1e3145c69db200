"""Options of a run: updates, metrics, initial weights and hosts, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from autoparallel.options.option import option
from autoparallel.planner.errors import UsageError

Init = Literal["auto", "sharded", "exact"]
"""Way to draw initial weights: only this rank's shards, exactly as on one device, or either."""

OnNan = Literal["ignore", "skip", "stop"]
"""Reaction to a gradient that is not finite: update all the same, skip the update, or stop."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run's steps.

    ``compiled`` None leaves to the plan whether blocks are compiled. ``elastic`` has planning
    options by name for new plans if fewer hosts than planned may continue the run, else None.
    ``trace_steps`` steps are recorded and written to ``trace``. ``check_first_step`` None compares
    the first step with the model alone if that is quick.
    """

    clip_norm: float | None = option(None, "scale the gradient down to this norm", metavar="NORM")
    clip_value: float | None = option(
        None, "clip each element of the gradient to [-X, X]", metavar="X"
    )
    accumulate: int = option(1, "global batches per update of the weights")
    loss_scale: float | None = option(
        None, "scale the loss, by X at first; skip updates that overflow", metavar="X"
    )
    on_nan: OnNan = option(
        "ignore", "what to do when a gradient is not finite", type=str, metavar="ignore|skip|stop"
    )
    metrics: str | None = option(None, "append each step's figures as JSON", metavar="FILE.jsonl")
    tensorboard: str | None = option(
        None, "write each step's figures for TensorBoard", metavar="DIR"
    )
    wandb: str | None = option(None, "log each step to Weights & Biases", metavar="PROJECT")
    verified: bool = option(
        False, "compare the plan with one device first, as verify does", flags=("--verify",)
    )
    compiled: bool | None = None
    elastic: Mapping[str, Any] | None = None
    trace_steps: int = option(
        0,
        "record N steps, compare them with the predicted step, and write a Chrome trace",
        min=0,
        metavar="N",
    )
    trace: str | None = option(None, "where --trace-steps writes; trace.json", metavar="FILE")
    count_routing: str | None = option(
        None, "count the tokens of each expert, for --routing of a plan", metavar="FILE"
    )
    check_first_step: bool | None = option(
        None,
        "compare the first step with the model alone: loss, norm of each gradient; default: where "
        "one device takes the step in 10 s",
        flags=("--check-first-step/--no-check-first-step",),
    )

    def resolved(self) -> RunOptions:
        """Return the options with absolute paths, for processes with another working folder."""
        return replace(
            self,
            metrics=absolute(self.metrics),
            tensorboard=absolute(self.tensorboard),
            trace=absolute(self.trace),
            count_routing=absolute(self.count_routing),
        )


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of a run's initial weights and data.

    Weights that the file ``weights`` does not contain are drawn as ``init`` says.
    """

    weights: str | None = option(
        None,
        "initial weights: a .safetensors, .pt or .bin file, a folder of save_pretrained, or a "
        "checkpoint",
        metavar="PATH",
    )
    weights_partial: bool = option(
        False,
        "allow names that only --weights or only the model has",
        flags=("--weights-partial",),
    )
    data: str | None = option(
        None,
        "train a causal language model on text: a file, JSON lines with a field text, or a folder "
        "of .txt",
        metavar="PATH",
    )
    init: str = option(
        "auto",
        "initial weights: exact (those of a plain build, for which each rank draws the whole "
        "model's), sharded (each rank draws its own shards) or auto (exact up to 10 s)",
    )

    def resolved(self) -> Sources:
        """Return the sources with absolute paths, for processes with another working folder."""
        return replace(self, weights=absolute(self.weights), data=absolute(self.data))


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of a run on several hosts, each of which starts its own ranks."""

    nnodes: str | None = option(
        None, "hosts of the run, on each of which this is started", metavar="N|MIN:MAX"
    )
    rdzv_endpoint: str | None = option(
        None,
        "where the hosts meet: an address of one of them, and a free port there",
        metavar="HOST:PORT",
    )
    join_timeout: float = option(600.0, "seconds to wait for the other hosts", min=1.0)
    elastic: bool = option(
        False,
        "go on with MIN hosts or more, by a plan for those that are there",
        flags=("--elastic",),
    )


def absolute(path: str | None) -> str | None:
    """Return ``path`` as an absolute path; None for None."""
    return None if path is None else str(Path(path).resolve())


def checked_init(init: str) -> Init:
    """Return ``init`` if it is known, else raise UsageError AP850.

    >>> checked_init("exact")
    'exact'
    """
    known: dict[str, Init] = {name: name for name in get_args(Init)}
    if init in known:
        return known[init]
    raise UsageError(
        "AP850",
        f"unknown initialization {init!r}",
        fix="exact (the values of a plain build), sharded (each rank draws its own shards) or auto "
        "(exact where that takes a rank less than 10 s)",
    )
