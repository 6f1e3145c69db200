"""Submeshes: the runs of ranks a stage may have, and the logical meshes on them.

Stages take ranks in order, so a submesh is a run of ranks: of neighbours within a host, or
whole hosts (of unequal hosts see ``heterogeneous.run_sizes``). On it lie the meshes dp × tp, and
those with "ep" and "cp" that are asked for or worth trying (``mesh_proposals``), "tp" innermost,
where the links are fastest; axes of size 1 are left out.
"""

from __future__ import annotations

from math import prod

from ...cost_model.cluster import Cluster
from ..layout import Mesh
from ..pricing.choices import Restriction
from ..requests.request import Forced, divisors
from .heterogeneous import run_sizes


def submesh_sizes(cluster: Cluster, first: int) -> tuple[int, ...]:
    """How many ranks a stage that starts at rank ``first`` may have.

    >>> from autoparallel.cost_model.shorthand import parse_cluster
    >>> submesh_sizes(parse_cluster("2x6xH100"), 0), submesh_sizes(parse_cluster("2x6xH100"), 2)
    ((1, 2, 3, 4, 5, 6, 12), (1, 2, 3, 4))
    """
    if len({host.num_devices for host in cluster.hosts}) > 1:
        return run_sizes(cluster, first)
    size = cluster.hosts[0].num_devices
    host, offset = divmod(first, size)
    if offset:
        return tuple(range(1, size - offset + 1))
    return (*range(1, size), *(size * count for count in range(1, len(cluster.hosts) - host + 1)))


def meshes(num_devices: int, host_size: int, forced: Forced) -> tuple[Mesh, ...]:
    """The meshes of a submesh that the forced degrees allow, data-parallel first.

    Unless forced, "tp" stays within a host, if hosts have several devices: ``host_size``
    neighbours never cross hosts.

    >>> [mesh.shape for mesh in meshes(4, 4, Forced())]
    [(4,), (2, 2), (4,)]
    """
    found = []
    cp, ep = forced.cp or 1, forced.ep or 1
    for tp in divisors(num_devices // (cp * ep)) if num_devices % (cp * ep) == 0 else ():
        dp = num_devices // (tp * cp * ep)
        if forced.dp not in (None, dp) or forced.tp not in (None, tp):
            continue
        if host_size > 1 and host_size % tp and forced.tp is None and forced.dp is None:
            continue
        found.append(mesh_of(dp, tp, cp, ep))
    return tuple(found)


def mesh_of(dp: int, tp: int, cp: int = 1, ep: int = 1) -> Mesh:
    """The mesh of these degrees without axes of size 1, in the order dp, ep, cp, tp.

    >>> mesh_of(1, 1), mesh_of(1, 4)
    (Mesh(axes=('dp',), shape=(1,)), Mesh(axes=('tp',), shape=(4,)))
    >>> mesh_of(2, 4, 2)
    Mesh(axes=('dp', 'cp', 'tp'), shape=(2, 2, 4))
    """
    degrees = (("dp", dp), ("ep", ep), ("cp", cp), ("tp", tp))
    sizes = {name: size for name, size in degrees if size > 1} or {"dp": 1}
    return Mesh(tuple(sizes), tuple(sizes.values()))


def num_row_parts(mesh: Mesh) -> int:
    """Into how many parts a mesh must be able to cut a micro-batch: "dp" times "ep".

    >>> num_row_parts(mesh_of(2, 4, ep=2))
    4
    """
    sizes = zip(mesh.axes, mesh.shape, strict=True)
    return prod(size for name, size in sizes if name in ("dp", "ep"))


def restriction(mesh: Mesh, forced: Forced) -> Restriction:
    """What the axes of a mesh are for."""
    of = {name: axis for axis, name in enumerate(mesh.axes) if mesh.shape[axis] > 1}

    def axis_of(name: str) -> tuple[int, ...]:
        return (of[name],) if name in of else ()

    cp, ep = axis_of("cp"), axis_of("ep")
    return Restriction(
        axis_of("dp"),
        () if forced.tp is None else tuple(i for i, n in enumerate(mesh.axes) if n == "tp"),
        forced.sequence_parallel,
        cp,
        split_experts=ep,
        gathers=(*ep, *cp),
    )
