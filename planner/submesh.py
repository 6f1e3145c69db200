"""Submeshes: the runs of ranks a stage may have, and the logical meshes on them.

Stages take ranks in order, so a submesh is a run of ranks that tiles: a divisor of its
host's devices, aligned to itself, or whole hosts. On it lie the meshes dp × tp, "tp"
innermost, where the links are fastest; axes of size 1 are left out.
"""

from __future__ import annotations

from ..cost_model.cluster import Cluster
from .choices import Restriction
from .layout import Mesh
from .request import Forced, divisors


def submesh_sizes(cluster: Cluster, first: int) -> tuple[int, ...]:
    """How many ranks a stage that starts at rank ``first`` may have.

    >>> from autoparallel.cost_model.shorthand import parse_cluster
    >>> submesh_sizes(parse_cluster("2x6xH100"), 0), submesh_sizes(parse_cluster("2x6xH100"), 2)
    ((1, 2, 3, 6, 12), (1, 2))
    """
    host = cluster.host_of[first]
    start = cluster.host_of.index(host)
    size, offset = cluster.hosts[host].num_devices, first - start
    found = [n for n in divisors(size) if offset % n == 0 and offset + n <= size]
    if offset == 0:
        total = size
        for other in cluster.hosts[host + 1 :]:
            total += other.num_devices
            found.append(total)
    return tuple(found)


def meshes(num_devices: int, host_size: int, forced: Forced) -> tuple[Mesh, ...]:
    """The meshes of a submesh that the forced degrees allow, data-parallel first.

    Unless forced, "tp" stays within a host, if hosts have several devices.

    >>> [mesh.shape for mesh in meshes(4, 4, Forced())]
    [(4,), (2, 2), (4,)]
    """
    found = []
    for tp in divisors(num_devices):
        dp = num_devices // tp
        if forced.dp not in (None, dp) or forced.tp not in (None, tp):
            continue
        if 1 < host_size < tp and forced.tp is None and forced.dp is None:
            continue
        found.append(mesh_of(dp, tp))
    return tuple(found)


def mesh_of(dp: int, tp: int) -> Mesh:
    """The mesh of these degrees without axes of size 1.

    >>> mesh_of(1, 1), mesh_of(1, 4)
    (Mesh(axes=('dp',), shape=(1,)), Mesh(axes=('tp',), shape=(4,)))
    """
    if tp == 1:
        return Mesh(("dp",), (dp,))
    if dp == 1:
        return Mesh(("tp",), (tp,))
    return Mesh(("dp", "tp"), (dp, tp))


def restriction(mesh: Mesh, forced: Forced, *, free: bool = False) -> Restriction:
    """What the axes of a mesh are for. ``free`` leaves what is not forced to the solver."""
    split_batch = tuple(
        axis
        for axis, name in enumerate(mesh.axes)
        if name == "dp" and mesh.shape[axis] > 1 and not (free and forced.dp is None)
    )
    split_parameters = tuple(
        axis for axis, name in enumerate(mesh.axes) if name == "tp" and forced.tp is not None
    )
    return Restriction(split_batch, split_parameters)
