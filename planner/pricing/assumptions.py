"""What a training program is assumed to do, where it differs from this package's runtime.

Prices of plans that this package runs have none of it. Prices of other programs' runs have: they
keep gradients in another number format, or recompute other ops.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...cost_model.memory import PrecisionPolicy


@dataclass(frozen=True, slots=True)
class CostAssumptions:
    """How a program trains.

    ``policy``: the bytes per parameter, where they are not those of the precision and the
    optimizer. ``attention_core``: selective recomputation runs the core of attention again and
    nothing else (Korthikanti et al. 2022, arXiv:2205.05198, section 5). ``shards_over_context``:
    ZeRO shards the bytes of states over context-parallel ranks too, as Megatron-LM's distributed
    optimizer does.
    """

    policy: PrecisionPolicy | None = None
    attention_core: bool = False
    shards_over_context: bool = False


RUNTIME = CostAssumptions()
"""This package's own runtime."""
