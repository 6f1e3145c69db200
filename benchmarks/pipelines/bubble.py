"""Measured against simulated steps of emulated stages: real messages, compute that sleeps.

``python benchmarks/pipelines/bubble.py [--mbit 1000] [--bytes 1048576] [--json FILE] [NAME ...]``.
Four gloo ranks run each schedule through the runtime's interpreter and exchange; a forward or
backward sleeps for its modelled time and makes a tensor of the given size. With ``--mbit``
(needs root) every rank is in a network namespace of its own with links of that rate, else all
share the loopback. The simulator's inputs are measured right before each schedule, in the same
processes: seconds of a forward and a backward where a stage runs alone, the way of one message
that nothing else disturbs, and the calls. Printed per schedule: the step over the step without
messages, measured over simulated, both bubbles and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import links
from emulation import Job, run_rank

RANKS = 4
INPUTS = {
    "message_seconds": "a message",
    "occupied_seconds": "of it occupying the link",
    "send_call_seconds": "the call that sends it",
    "receive_call_seconds": "the call that posts its receive",
}
"""What is printed of the measured inputs of the simulator, the median over the schedules."""


def main(arguments: Sequence[str]) -> int:
    from autoparallel.planner.schedules.schedules import SCHEDULES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mbit", type=int, default=0, help="rate of each rank's link")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a message")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--realtime", action="store_true", help="ranks under chrt -r (root)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        run_rank(Job.parse(options.rank))
        return 0
    names = options.names or [name for name, info in SCHEDULES.items() if info.trains]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    job = Job(
        tuple(names),
        options.microbatches,
        options.bytes,
        options.rounds,
        options.forward_ms / 1e3,
        options.backward_ms / 1e3,
    )
    found = run(job, options.mbit, realtime=options.realtime)
    for line in table(found):
        print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host, kept from others until the workers have ended.

    Bound but not listening, it can still be listened on by rank 0, which also sets
    SO_REUSEADDR.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run(job: Job, mbit: int, *, realtime: bool) -> dict[str, Any]:
    """Starts the ranks, each in its namespace; what rank 0 has printed."""
    with links.network(RANKS, mbit) as places, reserved_port() as port:
        processes = []
        for rank, place in enumerate(places):
            command = [*place.prefix, *(["chrt", "-r", "10"] if realtime else [])]
            command += [sys.executable, __file__, "--rank", job.text()]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": place.interface,
                "OMP_NUM_THREADS": "1",
            }
            output = subprocess.PIPE if rank == 0 else None
            processes.append(subprocess.Popen(command, env=environment, stdout=output))
        try:
            text, _ = processes[0].communicate(timeout=900)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
    result: dict[str, Any] = json.loads(text)
    return result


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The result in lines; times only as ratios."""
    rows, forward = found["schedules"], found["job"]["forward_seconds"]
    for name, what in INPUTS.items():
        values = [row["inputs"][name] / forward for row in rows.values() if "inputs" in row]
        if values:
            yield f"{what}: {statistics.median(values):.3f} of a rank's forward"
    yield f"{'schedule':18s} over ideal  measured/simulated   bubble simulated  ratio"
    for name, row in rows.items():
        if "error" in row:
            yield f"{name:18s} not run: {row['error']}"
            continue
        yield (
            f"{name:18s} {row['step_seconds'] / row['ideal_seconds']:10.3f}"
            f" {row['step_seconds'] / row['simulated_seconds']:19.3f}"
            f" {row['bubble']:8.3f} {row['simulated_bubble']:9.3f}"
            f" {row['bubble'] / row['simulated_bubble']:6.3f}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
