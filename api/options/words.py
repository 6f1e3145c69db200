"""Formatting of numbers and layouts as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoparallel.planner.graph.layout import Layout, Mesh


def bytes_text(num_bytes: float) -> str:
    """Format bytes in binary units with three digits.

    >>> bytes_text(1536), bytes_text(3.5 * 2**30), bytes_text(12)
    ('1.50 KiB', '3.50 GiB', '12 B')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{_three(size)} {unit}"
        size /= 1024
    raise AssertionError("the last unit always returns")


def seconds_text(seconds: float) -> str:
    """Format a duration with its unit and three digits.

    >>> seconds_text(1.234), seconds_text(0.0456), seconds_text(7.8e-6), seconds_text(95)
    ('1.23 s', '45.6 ms', '7.80 µs', '95.0 s')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{_three(seconds / scale)} {unit}"
    return "0 s" if abs(seconds) < 5e-10 else f"{_three(seconds / 1e-6)} µs"


def duration_text(seconds: float) -> str:
    """Format a long time in minutes, hours or days, a short time in seconds.

    >>> duration_text(90), duration_text(600), duration_text(3 * 86400)
    ('90.0 s', '10.0 minutes', '3.00 days')
    """
    for scale, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * scale:
            return f"{_three(seconds / scale)} {unit}"
    return seconds_text(seconds)


def count_text(count: float) -> str:
    """Format a count with three digits and k, M, B or T.

    >>> count_text(13_900_000), count_text(950), count_text(8.03e9)
    ('13.9 M', '950', '8.03 B')
    """
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= scale:
            return f"{_three(count / scale)} {unit}"
    return f"{count:.0f}"


def rate_text(per_second: float, unit: str) -> str:
    """Format a rate with three digits and M, G or T.

    >>> rate_text(450e9, "B/s"), rate_text(989e12, "FLOP/s")
    ('450 GB/s', '989 TFLOP/s')
    """
    for scale, prefix in ((1e12, "T"), (1e9, "G")):
        if per_second >= scale:
            return f"{_three(per_second / scale)} {prefix}{unit}"
    return f"{_three(per_second / 1e6)} M{unit}"


def percent_text(fraction: float) -> str:
    """Format a fraction in percent with two digits.

    >>> percent_text(0.4567), percent_text(0.034), percent_text(0.0004), percent_text(0.0)
    ('46 %', '3.4 %', '<0.1 %', '0 %')
    """
    if fraction == 0:
        return "0 %"
    if abs(fraction) < 0.001:
        return "<0.1 %"
    return (
        f"{fraction:.1%}".replace("%", " %")
        if abs(fraction) < 0.1
        else f"{fraction:.0%}".replace("%", " %")
    )


SOURCE_WORDS = {
    "measured": "measured",
    "interpolated": "interpolated",
    "spec": "from specifications",
}


def shares_text(shares: Mapping[str, float], error: float = 0.0) -> str:
    """Describe shares of time by source; ``error`` is the relative error of interpolated times.

    >>> shares_text({"measured": 0.71, "interpolated": 0.22, "spec": 0.07}, 0.06)
    '71 % measured, 22 % interpolated (±6.0 %), 7.0 % from specifications'
    """
    parts = []
    for source, word in SOURCE_WORDS.items():
        if shares.get(source, 0.0) > 0:
            sure = f" (±{percent_text(error)})" if source == "interpolated" and error else ""
            parts.append(f"{percent_text(shares[source])} {word}{sure}")
    return ", ".join(parts)


def _three(value: float) -> str:
    magnitude = abs(value)
    return (
        f"{value:.2f}"
        if magnitude < 9.995
        else f"{value:.1f}"
        if magnitude < 99.95
        else f"{value:.0f}"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Format a list of ranks, with consecutive ranks folded.

    >>> ranks_text((0, 1, 2, 3)), ranks_text((5,)), ranks_text((0, 2, 4))
    ('0–3', '5', '0, 2, 4')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def held_text(layout: Layout, mesh: Mesh) -> str:
    """Describe the layout of a parameter on a mesh.

    >>> from autoparallel.planner.graph.layout import REPLICATE, shard
    >>> held_text((REPLICATE, shard(0)), Mesh(("dp", "tp"), (2, 2)))
    'dim 0 sharded over tp'
    >>> held_text((REPLICATE,), Mesh(("dp",), (2,)))
    'replicated'
    """
    splits: dict[int, list[str]] = {}
    for placement, axis, size in zip(layout, mesh.axes, mesh.shape, strict=True):
        if placement.is_shard and size > 1:
            splits.setdefault(placement.dim, []).append(axis)
    parts = [f"dim {dim} sharded over {' and '.join(axes)}" for dim, axes in sorted(splits.items())]
    return ", ".join(parts) or ("unsharded" if mesh.size == 1 else "replicated")


def names_text(names: Sequence[str]) -> str:
    """Join names, with runs of consecutively numbered names folded.

    >>> names_text(["embed", "layers.0", "layers.1", "layers.2", "head"])
    'embed, layers.0–2, head'
    """
    parts: list[tuple[str, int | None, int | None]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if not (stem and number.isdecimal()):
            parts.append((name, None, None))
        elif parts and parts[-1][0] == stem and parts[-1][2] == int(number) - 1:
            parts[-1] = (stem, parts[-1][1], int(number))
        else:
            parts.append((stem, int(number), int(number)))
    return ", ".join(_folded(*part) for part in parts)


def _folded(stem: str, first: int | None, last: int | None) -> str:
    if first is None:
        return stem
    return f"{stem}.{first}" if first == last else f"{stem}.{first}–{last}"
