"""Caches of prices and tables that all meshes of one graph share.

In: a key, and a function that makes its value. Out: the value, made on first use. Every cache has
its own type; one ``PriceCache`` may serve all meshes, micro-batch sizes and searches of one graph
and one cluster, whatever the order of its hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...cost_model.cluster.cluster import Cluster, Source
from ...cost_model.collectives.collectives import Group
from ...cost_model.collectives.dispatch import GroupLimit
from ...cost_model.profile.lookup import Profile
from ..graph.expert_dims import ExpertDims
from ..graph.graph import TensorSpec
from ..graph.layout import AxisStrategy, Layout, Mesh
from ..graph.positions import Dims
from ..integer_programs.program import Floats, Ints
from ..kernels.recompute import Replay
from ..kernels.tiles import TiledRegion
from .seconds import ExpertSpread, Priced

if TYPE_CHECKING:
    from ..intra_op.elimination import Order
    from ..intra_op.kind_tables import KindTables
    from ..stage.kind_model import KindModel, OpStorages
    from ..stage.outline import Choice, DecisionSpace
    from ..stage.stage_model import Options, Targets
    from ..stage.terms import PlacedTerm, Term
    from .conversions import Changes
    from .kept_bytes import LastOps

K = TypeVar("K")
T = TypeVar("T")


def find(table: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """Return the value of ``key`` in ``table``; ``make`` it on first use."""
    value = table.get(key)
    if value is None:
        value = table[key] = make()
    return value


def number_of(numbers: dict[K, int], value: K) -> int:
    """Return the number (from 1) of ``value`` in ``numbers``; a new value gets the next number."""
    return numbers.setdefault(value, len(numbers) + 1)


@dataclass
class ByIdentity(Generic[T]):
    """Cache keyed by the identity of objects that are slow to compare or hash.

    The objects are kept with the value, so that their ids stay unique.
    """

    _values: dict[tuple[object, ...], tuple[tuple[Any, ...], T]] = field(default_factory=dict)

    def find(self, key: tuple[object, ...], given: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the value for ``key`` and the objects ``given``; ``make`` it on first use."""
        own = (*key, *map(id, given))
        kept = self._values.get(own)
        if kept is None:
            kept = self._values[own] = given, make()
        return kept[1]


@dataclass
class ConversionCache:
    """Cache of the seconds of layout conversions, for meshes with equal axes and rank groups."""

    seconds: dict[tuple[TensorSpec, Layout, Layout], tuple[float, float]] = field(
        default_factory=dict
    )
    merged: ByIdentity[tuple[Ints, Ints, Floats]] = field(default_factory=ByIdentity)


MeshKey = tuple[Mesh, tuple[Group, ...], Profile | None, Source | None]


@dataclass
class PriceCache:
    """All price caches of a graph; an ``int`` in a key is a batch size or the size of an axis."""

    groups: dict[tuple[int, Mesh, tuple[int, ...], tuple[int, ...]], tuple[Cluster, Group]] = field(
        default_factory=dict
    )
    routers: dict[int, frozenset[str]] = field(default_factory=dict)
    ops: dict[tuple[object, ...], Priced] = field(default_factory=dict)
    collectives: dict[tuple[object, ...], Priced] = field(default_factory=dict)
    spreads: dict[tuple[object, ...], ExpertSpread] = field(default_factory=dict)
    messages: dict[tuple[int, Group, Profile | None], Priced] = field(default_factory=dict)
    updates: dict[tuple[object, ...], Priced] = field(default_factory=dict)
    conversions: dict[MeshKey, ConversionCache] = field(default_factory=dict)
    changes: dict[int, Changes] = field(default_factory=dict)
    layout_numbers: ByIdentity[Ints] = field(default_factory=ByIdentity)

    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    forms: dict[tuple[int, int], int] = field(default_factory=dict)
    strategies: dict[tuple[int, int, GroupLimit, bool], tuple[AxisStrategy, ...]] = field(
        default_factory=dict
    )
    beside: dict[tuple[str, ...], Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    rows_apart: dict[int, Mapping[str, tuple[int | None, ...]]] = field(default_factory=dict)
    classes_of: ByIdentity[list[str]] = field(default_factory=ByIdentity)
    offers: ByIdentity[int] = field(default_factory=ByIdentity)
    position_dims: ByIdentity[Dims] = field(default_factory=ByIdentity)
    expert_dims: ByIdentity[ExpertDims] = field(default_factory=ByIdentity)
    storages: dict[int, Mapping[tuple[str, int], tuple[str, int]]] = field(default_factory=dict)
    from_parameters: dict[str, bool] = field(default_factory=dict)
    replays: ByIdentity[Replay] = field(default_factory=ByIdentity)
    last_regions: dict[tuple[str, int], TiledRegion | None] = field(default_factory=dict)

    spaces: dict[tuple[object, ...], DecisionSpace] = field(default_factory=dict)
    traits: dict[tuple[object, ...], Any] = field(default_factory=dict)
    held_choices: dict[tuple[str, tuple[Layout, ...]], tuple[Choice, ...]] = field(
        default_factory=dict
    )
    held: dict[tuple[int, tuple[int, ...], LastOps], dict[tuple[object, ...], OpStorages]] = field(
        default_factory=dict
    )
    kinds: ByIdentity[KindModel] = field(default_factory=ByIdentity)
    layouts: dict[tuple[Layout, ...], tuple[Layout, ...]] = field(default_factory=dict)
    options: ByIdentity[Options] = field(default_factory=ByIdentity)
    targets: ByIdentity[Targets] = field(default_factory=ByIdentity)

    kind_tables: ByIdentity[KindTables] = field(default_factory=ByIdentity)
    terms: ByIdentity[tuple[Term, ...]] = field(default_factory=ByIdentity)
    placed_terms: ByIdentity[tuple[PlacedTerm, ...]] = field(default_factory=ByIdentity)
    orders: dict[tuple[object, ...], Order] = field(default_factory=dict)
    block_seconds: ByIdentity[Any] = field(default_factory=ByIdentity)
