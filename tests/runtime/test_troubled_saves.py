"""A save that fails in the middle of a run ends no training; if the last one fails, the run does.

The disk is really full, or its file system is really read-only: where the test may mount one.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import MachineError
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.checkpoint.folder import complete_checkpoints
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TINY = ("n_layer=2", "d_model=32", "n_head=2", "seq=16")
STEPS, FAILING = 6, 4
"""Every second step is saved; from this one on saves fail."""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    options = PlanOptions(
        global_batch=4, seq=16, profile="analytic", forced=parse_parallel("dp=2,zero=3")
    )
    save_plan(make_plan(load_target(str(GPT), parse_settings(TINY)), "cpu:2", options), path)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB; skips where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def limit(folder: Path, fails: bool) -> None:
    """This process' files end at 4 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = 4096 if fails else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def fill(folder: Path, fails: bool) -> None:
    ballast = folder / "ballast"
    if not fails:
        ballast.unlink()
        return
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def protect(folder: Path, fails: bool) -> None:
    way = "ro" if fails else "rw"
    subprocess.run(["mount", "-o", f"remount,{way}", str(folder)], check=True)


TROUBLES: dict[str, Callable[[Path, bool], None]] = {
    "limit": limit,
    "full": fill,
    "read-only": protect,
}


def trains_in_trouble(
    worker: Worker, trouble: str, disk: str, lasts: bool, **arguments: Any
) -> dict[str, Any]:
    """Saves every second step; from step ``FAILING`` on, to the end or for one save, it fails."""
    from autoparallel.training.worker import train

    tell, is_own = worker.watchdog.progress, worker.rank == 0 or trouble == "limit"

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(what, waits_for)
        if not is_own:
            return
        if what == f"writing the checkpoint of step {FAILING}":
            TROUBLES[trouble](Path(disk), True)
        if what == f"writing the checkpoint of step {STEPS}" and not lasts:
            TROUBLES[trouble](Path(disk), False)

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    try:
        return train(worker, **arguments)
    finally:
        if is_own and lasts:
            TROUBLES[trouble](Path(disk), False)


def run(plan_path: Path, disk: Path, trouble: str, *, lasts: bool, asynchronous: bool) -> Any:
    saving = {"folder": str(disk / "run"), "every": 2, "asynchronous": asynchronous}
    return launch(
        "test_troubled_saves:trains_in_trouble",
        {
            "trouble": trouble,
            "disk": str(disk),
            "lasts": lasts,
            "plan_path": str(plan_path),
            "steps": STEPS,
            "seed": 0,
            "saving": saving,
        },
        num_processes=2,
        environment=ALONE,
        timeout_seconds=60.0,
    )


def saved(disk: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(disk / "run")]


def check_goes_on(plan_path: Path, disk: Path, trouble: str, asynchronous: bool, err: Any) -> None:
    found = run(plan_path, disk, trouble, lasts=False, asynchronous=asynchronous)
    assert len(found["losses"]) == STEPS
    assert saved(disk) == [2, STEPS]
    text = err()
    assert "training goes on without a checkpoint" in text
    assert f"AP886]: the checkpoint step-{FAILING:08d} could not be written" in text


def check_ends(plan_path: Path, disk: Path, trouble: str, asynchronous: bool) -> None:
    with pytest.raises(MachineError, match="AP886") as caught:
        run(plan_path, disk, trouble, lasts=True, asynchronous=asynchronous)
    assert caught.value.exit_code == 5
    assert f"step-{STEPS:08d}" in str(caught.value)
    assert saved(disk) == [2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.mark.slow
def test_training_goes_on_after_a_save_that_failed(plan_path, tmp_path, capfd) -> None:
    check_goes_on(plan_path, tmp_path, "limit", False, lambda: capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_training_goes_on_with_a_disk_in_trouble(
    plan_path, small_disk, capfd, trouble, asynchronous
) -> None:
    check_goes_on(plan_path, small_disk, trouble, asynchronous, lambda: capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_run_whose_last_save_fails_ends_with_its_error(
    plan_path, small_disk, trouble, asynchronous
) -> None:
    check_ends(plan_path, small_disk, trouble, asynchronous)
