"""The committed baseline: of each case the plan, and what is worth reading of it.

``baseline.json`` has a record of each case, for readers; ``plans/NAME.json.xz`` the plan itself,
which comparisons price again. A case that must be refused has the error's code and no plan.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "baseline.json"
PLANS = HERE / "plans"


def reference(name: str) -> dict[str, Any]:
    """What the baseline found: the ``plan``, or the ``code`` of the error."""
    record = records()[name]
    return (
        record if "code" in record else {"plan": lzma.decompress(_file(name).read_bytes()).decode()}
    )


def records() -> dict[str, dict[str, Any]]:
    """The records by the names of their cases."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def write(name: str, answer: Mapping[str, Any]) -> None:
    """Keeps the answer of a worker as the baseline of a case."""
    found = answer["found"]
    _file(name).unlink(missing_ok=True)
    if "plan" in found:
        PLANS.mkdir(exist_ok=True)
        _file(name).write_bytes(lzma.compress(found["plan"].encode(), preset=9))
    record = {"code": found["code"]} if "code" in found else record_of(answer)
    known = {**records(), name: record}
    RECORDS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def record_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What is worth reading of a plan. ``evaluated_seconds`` are those that ``evaluate`` finds."""
    plan, (priced, *_) = json.loads(answer["found"]["plan"]), answer["priced"]
    prediction, solver = plan["prediction"], plan["solver"]
    stages = Counter(map(_stage_text, plan["stages"]))
    return {
        "step_seconds": prediction["step_seconds"],
        "evaluated_seconds": priced.get("step_seconds"),
        "peak_bytes": prediction["peak_memory_bytes"],
        "schedule": plan["schedule"],
        "num_microbatches": plan["num_microbatches"],
        "stages": [f"{number} x {text}" for text, number in stages.items()],
        "gap": solver["gap"],
        "stopped": solver["stopped"],
    }


def _stage_text(stage: Mapping[str, Any]) -> str:
    """A stage in words: blocks, mesh, ZeRO stage, recomputed blocks, unequal shares."""
    mesh = zip(stage["mesh"]["axes"], stage["mesh"]["shape"], strict=True)
    parts = [f"{len(stage['blocks'])} blocks", *(f"{axis}={size}" for axis, size in mesh)]
    parts += [f"zero={stage['zero']}"] if stage["zero"] else []
    modes = Counter(block["recompute"] for block in stage["blocks"])
    parts += [f"{modes[mode]} {mode}" for mode in ("selective", "full") if modes[mode]]
    parts += [f"shares={stage['shares']}"] if stage["shares"] else []
    return ", ".join(parts)


def _file(name: str) -> Path:
    return PLANS / f"{name}.json.xz"
