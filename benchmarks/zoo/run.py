"""The zoo: every architecture of ``tests/zoo`` verified, and ``README.md`` written from it.

``python benchmarks/zoo/run.py [NAME ...]``. Each runs in a process of its own (``one.py``) with a
time limit, so one that crashes or hangs costs its own row and nothing else. What was found
before for names that are not given is kept, in ``build/zoo.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "build" / "zoo.json"
TABLE = Path(__file__).with_name("README.md")
LIMIT_SECONDS = 300.0

Result = Mapping[str, Any]


def names() -> list[str]:
    """Every configuration of the zoo, then the repository's own models."""
    configs = sorted(path.parent.name for path in (ROOT / "tests" / "zoo").glob("*/config.json"))
    own = ("mlp_mixer", "wide_resnet", "unet", "diffusion", "gshard_moe")
    files = [f"examples/{name}.py" for name in own if (ROOT / "examples" / f"{name}.py").exists()]
    return configs + files


def run(name: str) -> Result:
    """What ``one.py`` says of one architecture, or what became of it."""
    command = [sys.executable, str(Path(__file__).with_name("one.py")), name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        found = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(name, f"no answer within {LIMIT_SECONDS:.0f} s")
    lines = found.stdout.splitlines()
    if not lines:
        return _failed(name, f"exit code {found.returncode}: {found.stderr.strip()[-200:]}")
    result: Result = json.loads(lines[-1])
    return result


def _failed(name: str, error: str) -> Result:
    return {"name": name, "error": error, "plans": {}}


def passed(result: Result) -> list[str]:
    """The plans whose run equals one device."""
    return [plan for plan, outcome in result["plans"].items() if outcome.get("passed")]


def table(results: Sequence[Result]) -> str:
    """The page: a row per architecture, then what failed and why."""
    whole = sum(bool(passed(result)) and not _failures(result) for result in results)
    lines = [
        "# The zoo",
        "",
        "Written by `make zoo`. Small configurations of real architectures (`tests/zoo`), in "
        "training mode with labels, are captured and planned for two devices under dp=2, tp=2 and "
        "pp=2, and for four as the planner chooses (own). Models with layers of experts are also "
        "planned for four, with experts spread over ranks that split samples, positions and "
        "weights (`EXPERT_PLANS` of `one.py`). Each plan is run by real gloo processes in float64 "
        "for two steps; the losses, every gradient and every weight are compared with one device, "
        "to 1e-9 of their magnitude.",
        "",
        f"{whole} of {len(results)} are verified under all their plans. Ops: nodes of the graph "
        "and distinct ones. Missing: ops without a rule, which run whole. Batch: whether it can "
        "be split into micro-batches (no: rows of the batch meet before the loss, or cannot be "
        "followed; the global batch is one micro-batch). Seconds: capture plus the planner's own "
        "choice, on two cores.",
        "",
        "| architecture | ops | missing | batch | verified | largest error | seconds |",
        "|---|---|---|---|---|---|---|",
        *(_row(result) for result in results),
    ]
    failures = [line for result in results for line in _failures(result)]
    return "\n".join([*lines, *(["", "## Not verified", "", *failures] if failures else []), ""])


def _row(result: Result) -> str:
    verified = passed(result)
    worst = max((result["plans"][plan]["worst"] for plan in verified), default=None)
    cells = [
        Path(result["name"]).stem,
        f"{result.get('num_nodes', 0)} / {result.get('num_ops', 0)}",
        ", ".join(op.removeprefix("aten.") for op in result.get("missing", ())) or "none",
        "yes" if result.get("rescalable") else "no",
        "all" if verified and not _failures(result) else ", ".join(verified) or "none",
        "" if worst is None else f"{worst:.1e}",
        f"{result.get('capture_seconds', 0) + result.get('plan_seconds', 0):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _failures(result: Result) -> list[str]:
    name = Path(result["name"]).stem
    if result["error"]:
        return [f"- {name}: {result['error']}"]
    lines = []
    for plan, outcome in result["plans"].items():
        if "error" in outcome:
            lines.append(f"- {name}, {plan}: {outcome['error']}")
        elif outcome and not outcome["passed"]:
            first = outcome["failures"][0]
            lines.append(
                f"- {name}, {plan}: {first['quantity']} {first['name']} differs by "
                f"{first['relative']:.1e}"
            )
    return lines


def main(arguments: Sequence[str]) -> None:
    """Run the names given, or all, and write the table of all that is known."""
    known: dict[str, Result] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    for name in arguments or names():
        known[name] = run(name)
        print(_row(known[name]), *_failures(known[name]), sep="\n", flush=True)
        KNOWN.parent.mkdir(exist_ok=True)
        KNOWN.write_text(json.dumps(known, indent=1))
    results = [known[name] for name in names() if name in known]
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
