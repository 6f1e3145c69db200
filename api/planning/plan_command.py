"""Command line equivalent to a request, for users to paste from an error that names a change."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby

from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.planner.requests.request import Forced, Request

IMPLIED = frozenset({"servers"})
"""Features that planning may deny because of the model, without the user's ``--deny``."""

_DEFAULTS = Request(1)
_SAME = ("precision", "gradient_dtype", "optimizer", "max_tp", "gap", "solver")
"""Fields of a request whose command-line option has the same name."""


def plan_command(cluster: Cluster, request: Request) -> str:
    """Return the command ``autoparallel plan …`` that makes a request for a cluster.

    The command is "" if the cluster has no shorthand, or the target no name.
    """
    place = shorthand_of(cluster)
    if not place or not request.target:
        return ""
    words = ["autoparallel", "plan", request.target, "--cluster", place, *_options(request)]
    return " ".join(map(shlex.quote, words))


def _options(request: Request) -> Iterator[str]:
    yield from ("--global-batch", str(request.global_batch))
    if request.seq is not None:
        yield from ("--seq", str(request.seq))
    for name in _SAME:
        value = getattr(request, name)
        if value != getattr(_DEFAULTS, name):
            yield from (f"--{name.replace('_', '-')}", str(value))
    if request.precision in ("bf16", "fp16", "fp8") and request.float32_ops == "none":
        yield from ("--float32-ops", "none")
    if request.memory_limit_bytes is not None:
        yield from ("--memory-limit", f"{request.memory_limit_bytes}B")
    if request.microbatch_size is not None:
        yield from ("--micro-batch", str(request.microbatch_size))
    if degrees := forced_text(request.forced):
        yield from ("--parallel", degrees)
    for pin in request.pins:
        yield from ("--pin", str(pin))
    for path in request.stage_at:
        yield from ("--stage-at", path)
    if denied := sorted(request.features.denied - IMPLIED):
        yield from ("--deny", ",".join(denied))
    if request.features.changes:
        yield from ("--allow", ",".join(sorted(request.features.changes)))
    if request.goal.objective != "time":
        yield from ("--objective", request.goal.objective)
    for name, value in request.settings.items():
        yield from ("--lora", str(value)) if name == "lora" else ("--set", f"{name}={value}")


def forced_text(forced: Forced) -> str:
    """Return forced choices in the syntax of ``--parallel``.

    >>> forced_text(Forced(dp=2, num_microbatches=4, sequence_parallel=True))
    'dp=2,microbatches=4'
    """
    names = {"num_microbatches": "microbatches", "sequence_parallel": ""}
    given = {names.get(f.name, f.name): getattr(forced, f.name) for f in fields(forced)}
    return ",".join(
        f"{name}={value}" for name, value in given.items() if name and value is not None
    )


def shorthand_of(cluster: Cluster) -> str:
    """Return the shorthand of a cluster made from presets, "" for other clusters.

    >>> from dataclasses import replace
    >>> twice = parse_cluster("2xH100")
    >>> shorthand_of(replace(twice, hosts=twice.hosts * 2, name="2 × 2xH100"))
    '2x2xH100'
    """
    groups = [(host, len(list(equal))) for host, equal in groupby(cluster.hosts)]
    plain = "+".join(
        f"{f'{count}x' if count > 1 else ''}{host.num_devices}x{host.device.name}"
        for host, count in groups
    )
    for text in (cluster.name, plain):
        try:
            found = parse_cluster(text)
        except ClusterError:
            continue
        if _links(found) == _links(cluster):
            return text
    return ""


def _links(cluster: Cluster) -> tuple[object, ...]:
    """Return the number and name of each host's devices, and the links of a cluster."""
    hosts = [(host.num_devices, host.device.name, host.link) for host in cluster.hosts]
    return hosts, cluster.inter_link, cluster.rack_link
