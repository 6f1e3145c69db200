"""Our training step beside torch's own, for the same model and the same split.

``python benchmarks/runtime/run.py [--peers ddp,fsdp,tp] [--sizes small,20m] [--ranks 2,4]
[--turns N] [--profile] [--json FILE]``. For every case torchrun starts the ranks, which train the
same GPT in three ways: by torch (DDP, FSDP2 or ``parallelize_module``), by autoparallel in an
ordinary loop, and by ``autoparallel.Step``. They take turns, step by step, so that what else the
machine does falls on all. A turn is timed from a barrier to the last rank's end. Printed: the ratio
of medians, ours to torch's, of the seconds of a step and of the processor time that all ranks took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES: dict[str, dict[str, Any]] = {
    "small": {"model": {"num_layers": 2, "width": 64, "num_heads": 4}, "seq": 32, "rows": 2},
    "20m": {"model": {"num_layers": 6, "width": 512, "num_heads": 8}, "seq": 64, "rows": 2},
    "60m": {"model": {"num_layers": 19, "width": 512, "num_heads": 8}, "seq": 64, "rows": 2},
}
"""0.15, 19.2 and 60.2 million parameters; ``rows`` are those of one rank."""
TURNS = {"small": 200, "20m": 24, "60m": 10}

COLUMNS = (
    "torch",
    "parameters",
    "ranks",
    "torch ms",
    "loop",
    "Step",
    "loop, processor",
    "Step, processor",
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="ddp,fsdp,tp")
    parser.add_argument("--sizes", default="small,20m")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--turns", type=int, help="how many of each, by default by the size")
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spends time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows = []
    for peer in options.peers.split(","):
        for size in options.sizes.split(","):
            for ranks in map(int, options.ranks.split(",")):
                case = {
                    **SIZES[size],
                    "peer": peer,
                    "profile": options.profile,
                    "turns": options.turns or TURNS[size],
                }
                found = measure(case, ranks)
                rows.append({"peer": peer, "size": size, "ranks": ranks, **found})
                print(table_row(rows[-1]), flush=True)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(case: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The turns of all ways in seconds and in processor time. Raises where a rank fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        str(HERE / "worker.py"),
        json.dumps(case),
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def table_row(row: Mapping[str, Any]) -> str:
    """One line of the table: torch's median, and the ratios of medians of ours to it."""
    seconds, processor = row["seconds"], row["processor"]
    base = 1000 * statistics.median(seconds["torch"])
    ratios = [
        f"{statistics.median(kind[name]) / statistics.median(kind['torch']):.2f}"
        for kind in (seconds, processor)
        for name in ("loop", "Step")
    ]
    parts = [row["peer"], row["size"], str(row["ranks"]), f"{base:.1f}", *ratios]
    return f"| {' | '.join(parts)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
