"""The cluster that a user means: ``local``, a shorthand, or a TOML file."""

from __future__ import annotations

from pathlib import Path

from .cluster import Cluster, ClusterError
from .cluster_file import load_cluster
from .detect import detect_cpu, detect_local
from .shorthand import is_shorthand, parse_cluster


def resolve_cluster(text: str) -> Cluster:
    """The cluster named by ``text``; raises ``ClusterError``.

    ``local`` detects this machine, ``cpu:N`` measures its CPU as N processes, a shorthand is
    made from presets, anything else is the path of a TOML file.
    """
    word = text.strip()
    if word == "local":
        return detect_local()
    if is_shorthand(word):
        cluster = parse_cluster(word)
        is_cpu_here = word.lower().startswith("cpu:") and not set("@+") & set(word)
        return detect_cpu(cluster.num_devices) if is_cpu_here else cluster
    path = Path(word)
    try:
        return load_cluster(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        if path.suffix == ".toml" or path.exists():
            raise ClusterError(f"the file cannot be read: {error}", word) from error
    return parse_cluster(word)
