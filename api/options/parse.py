"""Parsing of option texts: sizes, settings and forced degrees.

This file does not import torch, so that a mistyped option is reported at once.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from autoparallel.cost_model.cluster.given_text import shortened, whole_number
from autoparallel.cost_model.ops.memory import Offload
from autoparallel.cost_model.simulator.consistency import CONSISTENCIES
from autoparallel.planner.errors import UsageError
from autoparallel.planner.requests.features import MODES
from autoparallel.planner.requests.goal import ANY_DEVICE, Deadline
from autoparallel.planner.requests.request import ALL_REDUCES, Forced

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

Sorting = Literal["devices", "days", "dollars"]
"""Column by which the rows of a table of estimates are sorted."""

Texts = str | Sequence[str] | None
"""One or several texts, or None."""

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

FIELDS = {
    name.removeprefix("num_"): name
    for name in Forced.__dataclass_fields__
    if name != "sequence_parallel"
}
"""Fields of ``Forced`` by their names in ``--parallel``."""

DEGREES = tuple(FIELDS)


def parse_size(text: str) -> int:
    """Parse a size with a unit into bytes; GB is 1e9 and GiB is 2**30.

    >>> parse_size("72GiB"), parse_size("80 GB"), parse_size("1.5kB")
    (77309411328, 80000000000, 1500)
    """
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).lower() not in UNITS:
        raise _bad_size(text)
    size = float(match.group(1)) * UNITS[match.group(2).lower()]
    if not 1 <= size < 1e18:
        raise _bad_size(text)
    return int(size)


def _bad_size(text: str) -> UsageError:
    return UsageError(
        "AP117",
        f"invalid size {shortened(text)!r}",
        fix="write a number and a unit: 72GiB (2**30 bytes each) or 80GB (1e9 bytes each)",
    )


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse ``name=value`` pairs into keyword arguments for ``build_model``.

    A value is read as a Python literal, or else as text.

    >>> parse_settings(["layers=4", "name=small", "rope={'base': 1e4}"])
    {'layers': 4, 'name': 'small', 'rope': {'base': 10000.0}}
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        name = name.strip()
        if not separator or not name or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                "AP111", f"--set {pair!r} is not name=value", fix="for example: --set layers=4"
            )
        if name in settings:
            raise UsageError("AP111", f"--set gives {name!r} twice", where=f"--set {pair}")
        settings[name] = _literal(text.strip())
    return settings


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def parse_parallel(text: str | None) -> Forced:
    """Parse the degrees and choices in ``--parallel``; the search decides all others.

    >>> forced = parse_parallel("dp=2,microbatches=4,schedule=1f1b")
    >>> forced.dp, forced.tp, forced.num_microbatches, forced.schedule
    (2, None, 4, '1f1b')
    """
    forced: dict[str, Any] = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        name, separator, value = (part.strip().lower() for part in item.partition("="))
        if not separator or not value:
            raise _bad_parallel(f"{item.strip()!r} is not name=value", text)
        if name not in DEGREES:
            raise _bad_parallel(f"{name!r} is not one of {', '.join(DEGREES)}", text, name)
        if name in forced:
            raise _bad_parallel(f"{name!r} is given twice", text)
        forced[name] = _parallel_value(name, value, text)
    return Forced(**{FIELDS[name]: value for name, value in forced.items()})


def _parallel_value(name: str, value: str, text: str | None) -> int | str:
    choices = {
        "recompute": MODES,
        "allreduce": ALL_REDUCES,
        "gradients": ("backward", "priority"),
        "offload": get_args(Offload),
        "consistency": CONSISTENCIES,
        "place": ("own", "beside"),
    }.get(name)
    if choices is not None:
        if value not in choices:
            raise _bad_parallel(f"{name}={value} is not one of {', '.join(choices)}", text)
        return value
    if name == "schedule" or (name, value) == ("slices", "auto"):
        return value
    try:
        number = whole_number(value)
    except ValueError as error:
        raise _bad_parallel(f"{name}={shortened(value)}: {error}", text) from error
    if name == "zero" and number > 3:
        raise _bad_parallel(f"zero={number} is not one of 0, 1, 2 and 3", text)
    if name not in ("zero", "staleness") and number < 1:
        raise _bad_parallel(f"{name}={number} is less than 1", text)
    return number


def _bad_parallel(what: str, text: str | None, name: str = "") -> UsageError:
    hint = did_you_mean(name, DEGREES) if name else ""
    return UsageError(
        "AP112",
        f"--parallel: {what}",
        where=f"--parallel {shortened(text or '')}",
        fix=hint or "for example: --parallel dp=2,tp=2,pp=2,zero=1,recompute=full,schedule=1f1b",
    )


_SPAN = re.compile(r"([0-9.]+(?:e[0-9]+)?)(ms|s|m|h|d)/([0-9.]+(?:e\+?[0-9]+)?)?(tokens?|steps?)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_deadline(text: str | None) -> Deadline | None:
    """Parse ``--deadline``: a time limit for a number of tokens or steps.

    >>> parse_deadline("2h/1000steps")
    Deadline(seconds=7200.0, count=1000.0, unit='steps')
    >>> parse_deadline("30d/2e12 tokens").count
    2000000000000.0
    """
    if text is None:
        return None
    match = _SPAN.fullmatch(text.replace(" ", "").lower())
    try:
        if match is None:
            raise ValueError
        seconds = float(match.group(1)) * _SECONDS[match.group(2)]
        count = float(match.group(3) or 1)
    except ValueError:
        seconds = count = 0.0
    if match is None or seconds <= 0 or count <= 0:
        raise UsageError(
            "AP189",
            f"--deadline {text!r} is not TIME/COUNTtokens or TIME/COUNTsteps",
            fix="for example: --deadline 24h/1000steps, --deadline 30d/2e12tokens, "
            "--deadline 800ms/step; times are in ms, s, m, h or d",
        )
    unit = "tokens" if match.group(4).startswith("token") else "steps"
    return Deadline(seconds, count, cast(Literal["tokens", "steps"], unit))


def parse_prices(
    given: str | float | Sequence[str] | Mapping[str, float] | None,
) -> dict[str, float]:
    """Parse dollars per device and hour, by device name; "" stands for all devices.

    >>> parse_prices(["2.5"]), parse_prices(["H100=2.5,A100-80GB=1.2"]), parse_prices(2)
    ({'': 2.5}, {'H100': 2.5, 'A100-80GB': 1.2}, {'': 2.0})
    """
    if isinstance(given, Mapping):
        parts = [f"{name}={price}" for name, price in given.items()]
    elif isinstance(given, int | float):
        parts = [str(given)]
    else:
        every = (given,) if isinstance(given, str) else tuple(given or ())
        parts = [part for text in every for part in text.split(",")]
    found: dict[str, float] = {}
    for part in parts:
        name, _, text = part.rpartition("=")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf") or name.strip() in found:
            raise UsageError(
                "AP188",
                f"invalid price: --price {part!r}",
                why="it is given twice" if name.strip() in found and price >= 0 else "",
                fix="dollars per hour of one device: --price 2.5 or --price H100=2.5,A100=1.2",
            )
        found[name.strip() or ANY_DEVICE] = price
    return found


_COUNT = re.compile(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
_COUNT_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_count(text: str, option: str) -> float:
    """Parse a number of tokens with an optional suffix k, M, B or T; ``option`` is named in errors.

    >>> parse_count("15e12", "--tokens"), parse_count("300B", "--tokens")
    (15000000000000.0, 300000000000.0)
    """
    match = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    try:
        count = float(match.group(1)) * _COUNT_UNITS[match.group(2).lower()] if match else 0.0
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise UsageError(
            "AP352",
            f"{option} {text!r} is not a number of tokens",
            fix=f"for example: {option} 15e12, {option} 15T, {option} 300B",
        )
    return count


def choice_error(
    code: str, option: str, value: str, known: Sequence[str], *, where: str = ""
) -> UsageError:
    """Return UsageError ``code`` for a ``value`` of ``option`` that is not in ``known``, with the
    closest known value as its fix."""
    what = f"{option} {value!r} is not one of {', '.join(known)}"
    return UsageError(code, what, where=where, fix=did_you_mean(value, known))


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a sentence with the closest known name, "" if none is close.

    >>> did_you_mean("biuld_model", ["build_model", "loss_fn"])
    'did you mean build_model?'
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def texts(value: Texts) -> tuple[str, ...]:
    """Return one or several texts as a tuple.

    >>> texts("tp"), texts(["tp", "dp"]), texts(None)
    (('tp',), ('tp', 'dp'), ())
    """
    return (value,) if isinstance(value, str) else tuple(value or ())
