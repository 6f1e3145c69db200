"""Published collective times against the cost model, per source, device, collective and size.

``python benchmarks/collectives/run.py [--json] [FILE]``. The error is the mean of
|log(predicted/measured)| shown as a factor (10 % is a factor of 1.1 either way); the bias the
same with its sign, negative where the model is too fast. FILE has the columns of
``data/nccl.csv``. ``calibrate.py`` says how well constants predict a source they never saw.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cases import DATA, Case, band_of, error, grouped, predicted_seconds, read_cases


def row_key(case: Case) -> tuple[str, ...]:
    """What the cases of one line of the report share."""
    ranks = f"{case.group.num_hosts}x{case.group.ranks_per_host}"
    return case.source, case.gpu, ranks, case.network, case.kind, band_of(case.num_bytes)


def report(cases: Sequence[Case], left_out: dict[str, int]) -> str:
    """The page as text."""
    lines = ["cases  error     bias    source, device, hosts x ranks, link, collective, size"]
    for key, found in grouped(cases, row_key).items():
        lines.append(f"{error(found).text()}  {', '.join(key)}")
    lines.append("\nby size, within a host and between hosts")
    sides = grouped(cases, lambda c: ("between" if c.group.num_hosts > 1 else "within",))
    for (side,), part in sides.items():
        for (band,), found in grouped(part, lambda c: (band_of(c.num_bytes),)).items():
            lines.append(f"{error(found).text()}  {side}, {band}")
        lines.append(f"{error(part).text()}  {side}, all sizes")
    lines.append("\nby source")
    for (source,), found in grouped(cases, lambda case: (case.source,)).items():
        lines.append(f"{error(found).text()}  {source}")
    lines.append(f"{error(cases).text()}  all")
    lines.append("\nrows left out")
    lines += [f"{count:4d}  {reason}" for reason, count in left_out.items()]
    return "\n".join(lines)


def as_json(cases: Sequence[Case], left_out: dict[str, int]) -> str:
    """The same as JSON, with every case."""
    groups = [
        {
            **dict(
                zip(
                    ("source", "gpu", "hosts_x_ranks", "link", "collective", "size"),
                    key,
                    strict=True,
                )
            ),
            **asdict(error(found)),
        }
        for key, found in grouped(cases, row_key).items()
    ]
    rows = [
        {
            "source": case.source,
            "gpu": case.gpu,
            "collective": case.kind,
            "num_ranks": case.group.num_ranks,
            "num_hosts": case.group.num_hosts,
            "num_bytes": case.num_bytes,
            "measured_seconds": case.seconds,
            "predicted_seconds": predicted_seconds(case),
        }
        for case in cases
    ]
    found = {"all": asdict(error(cases)), "groups": groups, "left_out": left_out, "rows": rows}
    return json.dumps(found, indent=1)


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    cases, left_out = read_cases(arguments.file)
    print((as_json if arguments.json else report)(cases, left_out))


if __name__ == "__main__":
    main()
