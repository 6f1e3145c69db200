"""Does a long run grow? ``python benchmarks/soak/run.py [--minutes 60] [--json FILE]``.

A tiny model is trained on two ranks by several executors in turn, each with checkpoints written in
the background. In the middle of its time a rank is killed and the run resumed from its last
checkpoint; at the end of its time it is ended by SIGTERM, as a scheduler does, and must exit with
0. Every two seconds the resident memory, open files and threads of each process are read; the exit
code is 1 if one of them grows (``growth.py``), or a run ends otherwise. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.soak.growth import Series, growths  # noqa: E402

EXECUTORS = {
    "data parallel": "dp=2,zero=0",
    "ZeRO 3": "dp=2,zero=3",
    "tensor parallel": "tp=2",
    "pipeline": "pp=2,microbatches=4,schedule=1f1b",
}
MODEL = ("n_layer=2", "d_model=64", "n_head=2", "seq=64")
SAMPLE_SECONDS = 2.0
SAVE_EVERY = 50
END_SECONDS = 120.0
"""How long a run may take to end."""
QUANTITIES = {"memory": "bytes", "files": "files", "threads": "threads"}


@dataclass(slots=True)
class Process:
    """One process and what was read of it: seconds since it was first seen, and each quantity."""

    name: str
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def series(self, quantity: str) -> Series:
        return Series(self.seconds, getattr(self, quantity))


def rank_of(pid: int) -> str:
    """What a process of a run is: its rank, or "launcher"."""
    values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [value for value in values if value.startswith(b"RANK=")]
    return f"rank {found[0].removeprefix(b'RANK=').decode()}" if found else "launcher"


def descendants(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += descendants(int(child))
    return found


def read(pid: int, process: Process, began: float) -> None:
    """Adds a sample of a process; nothing if it ends meanwhile."""
    try:
        process.name = rank_of(pid)  # a rank that was just forked has its launcher's environment
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return
    process.seconds.append(time.monotonic() - began)
    process.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
    process.files.append(files)
    process.threads.append(threads)


def plan(folder: Path, parallel: str) -> Path:
    path = folder / "plan.json"
    settings = [part for each in MODEL for part in ("--set", each)]
    command = [
        sys.executable,
        "-m",
        "autoparallel",
        "plan",
        str(ROOT / "examples" / "gpt.py"),
        *settings,
        "--seq",
        "64",
        "--global-batch",
        "8",
        "--cluster",
        "cpu:2",
        "--profile",
        "analytic",
        "--parallel",
        parallel,
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return path


def train(
    path: Path, folder: Path, seconds: float, *, resumes: bool, is_killed: bool
) -> tuple[list[Process], str]:
    """Trains for so long; what was read of each process, and what went wrong."""
    saves = folder / "checkpoints"
    command = [
        sys.executable,
        "-m",
        "autoparallel",
        "run",
        str(path),
        "--steps",
        "100000000",
        "--save",
        str(saves),
        "--save-every",
        str(SAVE_EVERY),
        "--save-async",
        "--keep",
        "2",
    ]
    if resumes:
        command += ["--resume", str(saves)]
    log = folder / f"log-{resumes:d}.txt"
    began, processes = time.monotonic(), dict[int, Process]()
    with log.open("wb") as out:
        run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        while time.monotonic() - began < seconds and run.poll() is None:
            for pid in descendants(run.pid):
                read(pid, processes.setdefault(pid, Process("launcher")), began)
            time.sleep(SAMPLE_SECONDS)
        early = run.poll() is not None
        ranks = [pid for pid, process in processes.items() if process.name != "launcher"]
        if not early:
            victim = random.choice(ranks) if is_killed else run.pid
            os.kill(victim, signal.SIGKILL if is_killed else signal.SIGTERM)
        try:
            code = run.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            code = None
    wanted = 20 if is_killed else 0
    wrong = "" if code == wanted and not early else f"ended with {code}, not {wanted}: {log}"
    return list(processes.values()), wrong


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one quantity of one process."""

    executor: str
    part: str
    process: str
    quantity: str
    seconds: float
    first: float
    last: float
    growth: float
    grows: bool


def rows_of(executor: str, part: str, processes: Sequence[Process]) -> list[Row]:
    rows = []
    for process in processes:
        for quantity in QUANTITIES:
            found = growths(process.series(quantity), quantity)
            if found is not None:
                rows.append(Row(executor, part, process.name, quantity, *found))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each process of each part."""
    lines = [
        "| executor | part | process | minutes | memory, MiB | growth, MiB | files | threads |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        by.setdefault((row.executor, row.part, row.process), {})[row.quantity] = row
    for (executor, part, process), each in by.items():
        memory, files, threads = each["memory"], each["files"], each["threads"]
        lines.append(
            f"| {executor} | {part} | {process} | {memory.seconds / 60:.1f} "
            f"| {memory.first / 2**20:.1f} to {memory.last / 2**20:.1f} "
            f"| {memory.growth / 2**20:+.2f}{' **grows**' if memory.grows else ''} "
            f"| {files.first:.0f} to {files.last:.0f}{' **grows**' if files.grows else ''} "
            f"| {threads.first:.0f} to {threads.last:.0f}{' **grows**' if threads.grows else ''} |"
        )
    return "\n".join(lines)


def soak(minutes: float, executors: Mapping[str, str], folder: Path) -> tuple[list[Row], list[str]]:
    """All executors in turn; the rows and what went wrong."""
    rows, wrong, raw = list[Row](), list[str](), []
    part_seconds = minutes * 60 / len(executors) / 2
    for name, parallel in executors.items():
        own = folder / parallel.split(",")[0].replace("=", "") / parallel.replace(",", "-")
        own.mkdir(parents=True)
        path = plan(own, parallel)
        for part, is_killed in (("first", True), ("resumed", False)):
            processes, problem = train(
                path, own, part_seconds, resumes=part == "resumed", is_killed=is_killed
            )
            raw.append({"executor": name, "part": part, "processes": list(map(asdict, processes))})
            (folder / "samples.json").write_text(json.dumps(raw))
            found = rows_of(name, part, processes)
            rows += found
            wrong += [f"{name}, {part}: {problem}"] if problem else []
            wrong += [
                f"{name}, {part}: {row.quantity} of {row.process} grows"
                for row in found
                if row.grows
            ]
            print(table(found), flush=True)
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, default=None, help="keeps logs and samples there")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", default=None, help="executors by name, joined by commas")
    asked = parser.parse_args()
    chosen = EXECUTORS
    if asked.only is not None:
        chosen = {name: EXECUTORS[name] for name in asked.only.split(",")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows, wrong = soak(asked.minutes, chosen, folder)
    print(table(rows))
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for problem in wrong:
        print(f"FAILED: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
