"""Profile database: its path, and the measurements that apply to a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autoparallel.cost_model.cluster.cluster import Cluster, Device
from autoparallel.cost_model.cluster.detect import match_gpu_name, threads_per_device
from autoparallel.cost_model.profile.case import ProfileError
from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.environment import Environment, environment_of
from autoparallel.cost_model.profile.lookup import Profile, load_profile, load_shipped
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Mode


def default_database(
    environment: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> Path:
    """Return the path of the user's database, in the system's folder for user data.

    >>> str(default_database({"XDG_DATA_HOME": "/data"}, "linux"))
    '/data/autoparallel/profile.sqlite'
    """
    if platform == "win32" and "LOCALAPPDATA" in environment:
        folder = Path(environment["LOCALAPPDATA"])
    elif platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    elif environment.get("XDG_DATA_HOME"):
        folder = Path(environment["XDG_DATA_HOME"])
    else:
        folder = Path.home() / ".local" / "share"
    return folder / "autoparallel" / "profile.sqlite"


def database_path(text: str | None) -> Path:
    """Return the path that ``--database`` gives, or the path of the user's database."""
    return default_database() if text is None else Path(text)


def environment_for(cluster: Cluster) -> Environment | None:
    """Return the environment whose measurements apply to ``cluster``; None for mixed devices.

    Processes on one CPU share its memory and cores, so their number is part of the environment.
    """
    devices = {host.device.name: host.device for host in cluster.hosts}
    if len(devices) > 1:
        return None
    device = next(iter(devices.values()))
    if device.kind == "cuda":
        return environment_of(device.name)
    here = environment_of("cpu", threads=threads_per_device(cluster.num_devices))
    return replace(here, device=f"{here.device}, {cluster.num_devices} processes")


def measuring_environment(cluster: Cluster) -> Environment:
    """Return the environment (device, driver, versions) under which this process stores its
    measurements for a device of ``cluster``.

    Raises UsageError AP174 for a cluster with different devices.
    """
    found = environment_for(cluster)
    if found is None:
        names = ", ".join(dict.fromkeys(host.device.name for host in cluster.hosts))
        raise UsageError(
            "AP174",
            f"this cluster has different devices: {names}",
            fix="profile each kind of device separately, on a cluster of that kind",
        )
    return environment_of("cuda") if found.kind == "cuda" else found


def find_profile(cluster: Cluster, mode: Mode, database: str | None) -> Profile | None:
    """Return measurements for the devices of ``cluster``, the user's or shipped; None without any.

    Raises UsageError AP171 if the given ``database`` is missing, and AP172 if a database cannot be
    read.
    """
    if mode == "analytic":
        return None
    path = database_path(database) if database is None else find_file(Path(database))
    environment = environment_for(cluster)
    if environment is None:
        return None
    if path.exists():
        with explain_errors(path), Database(path, read_only=True) as opened:
            found = _load(opened, environment, cluster.hosts[0].device)
        if found is not None:
            return found
    return load_shipped(environment.device) if environment.kind == "cuda" else None


def _load(database: Database, environment: Environment, device: Device) -> Profile | None:
    """Load measurements of ``environment``. For a GPU without any, load those of a GPU in the
    database that the same preset describes."""
    found = load_profile(database, environment)
    if found is not None or environment.kind == "cpu":
        return found
    for each in database.environments():
        preset = match_gpu_name(each.device, device.memory_bytes) if not each.threads else None
        if preset is not None and preset.device.name == device.name:
            return load_profile(database, each)
    return None


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn errors of the profile database inside the context into UsageError AP172."""
    try:
        yield
    except ProfileError as error:
        raise UsageError(
            "AP172",
            f"the profile database cannot be used: {error.what}",
            where=error.where or str(path),
            fix=error.fix,
        ) from error


def find_file(path: Path) -> Path:
    """Return ``path`` if it exists, else raise UsageError AP171."""
    if not path.exists():
        raise UsageError(
            "AP171",
            f"there is no profile database {path}",
            fix="autoparallel profile TARGET"
            + ("" if path == default_database() else f" --database {path}")
            + " makes one",
        )
    return path


def database_counts(path: Path) -> list[tuple[Environment, int, int]]:
    """Count ops and transfers in a database by environment. Raises UsageError AP171, AP172."""
    with explain_errors(path), Database(find_file(path), read_only=True) as opened:
        return [
            (where, len(opened.all(where)), len(opened.all_transfers(where)))
            for where in opened.environments()
        ]
