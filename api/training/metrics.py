"""Outputs of a run's figures: a file of JSON lines, TensorBoard, Weights & Biases.

In: the records of steps. Out: the same figures by the same names in each output.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autoparallel.planner.errors import UsageError
from autoparallel.training.callbacks import Callback, StepRecord

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Python package that each metrics option needs, by option."""


def figures(record: StepRecord) -> dict[str, float | int | None]:
    """Return a step's loss, time and so on by name; None for infinity and NaN, which JSON lacks."""
    named: dict[str, float | int | None] = {
        "step": record.step,
        "loss": record.loss,
        "grad_norm": record.gradient_norm,
        "lr": record.learning_rate,
        f"{record.unit}_per_second": record.throughput,
        "memory_bytes": record.memory_bytes,
        "seconds": record.seconds,
        "skipped_steps": record.skipped_steps,
        "loss_scale": record.loss_scale,
    }
    return {
        name: None if value is not None and not math.isfinite(value) else value
        for name, value in named.items()
    }


def check_installed(wanted: Mapping[str, str | None]) -> None:
    """Raise UsageError AP905 if an option's package is not installed."""
    for option, value in wanted.items():
        if value is not None and importlib.util.find_spec(PACKAGES[option]) is None:
            raise _missing(option)


def _missing(option: str) -> UsageError:
    return UsageError(
        "AP905",
        f"--{option} needs the package {PACKAGES[option]}, which is not installed",
        fix=f"pip install {PACKAGES[option]}, or write a file of JSON lines: --metrics FILE.jsonl",
    )


class JsonLines(Callback):
    """Callback that appends a JSON object per step to a file.

    Raises UsageError AP906 if the file cannot be written.
    """

    def __init__(self, path: str | Path, *, kept: int | None = None) -> None:
        """Open the file. A run that resumes after step ``kept`` removes records of later steps."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if kept is not None and Path(path).exists():
                _remove_steps(Path(path), kept)
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - until close()
        except OSError as error:
            raise UsageError(
                "AP906",
                f"the metrics file {path} cannot be written",
                why=str(error),
                fix="use a path in a writable folder",
            ) from error

    def on_step(self, record: StepRecord) -> None:
        self._file.write(f"{json.dumps(figures(record))}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _remove_steps(path: Path, kept: int) -> None:
    """Remove the records of steps after ``kept`` at the end of the file.

    An incomplete last line is removed too. Reading backwards stops where step numbers stop
    decreasing, since earlier lines are of another run.
    """
    with path.open("rb+") as file:
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        above: float = math.inf
        while lines and kept < (step := _step_of(lines[-1])) < above:
            above = step
            lines.pop()
        file.truncate(sum(map(len, lines)))


def _step_of(line: bytes) -> int:
    """Return the step number in a line of a metrics file, 0 if it has none."""
    try:
        found = json.loads(line)
    except ValueError:
        return 0
    return int(found.get("step", 0)) if isinstance(found, dict) else 0


class TensorBoard(Callback):
    """Callback for TensorBoard scalars. Raises UsageError AP905 if TensorBoard is not installed."""

    def __init__(self, folder: str | Path, *, kept: int | None = None) -> None:
        """Open the writer. A run that resumes after step ``kept`` hides records of later steps."""
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise _missing("tensorboard") from error
        purged = None if kept is None else kept + 1
        self._writer: Any = module.SummaryWriter(str(folder), purge_step=purged)

    def on_step(self, record: StepRecord) -> None:
        for name, value in figures(record).items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Callback):
    """Callback that logs to a W&B project. Raises UsageError AP905 if wandb is not installed."""

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        """Begin a run in ``project``, with ``settings`` as its config."""
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise _missing("wandb") from error
        self._run = wandb.init(project=project, config=dict(settings))

    def on_step(self, record: StepRecord) -> None:
        named = figures(record)
        self._run.log({n: v for n, v in named.items() if n != "step"}, step=record.step)

    def close(self) -> None:
        self._run.finish()


class StepBar(Callback):
    """Callback that shows a progress bar, with the time left, below the steps on a terminal."""

    def __init__(self, num_steps: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task("", total=num_steps)
        self._bar.start()

    def on_step(self, record: StepRecord) -> None:
        self._bar.advance(self._task)

    def close(self) -> None:
        self._bar.stop()
