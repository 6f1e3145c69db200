"""Seconds of sending tokens to the ranks that hold their experts, or of bringing results back.

In: the bytes of a rank's own tokens, how many experts each token visits, the group of ranks over
which the experts are spread evenly, the dispatcher. Out: seconds of one direction.

``alltoall``, NCCL's, sends a copy of a token for every expert that it visits. ``deepep`` and
``hybridep`` send a token once to each other host, over the network, and hand it on there to each
rank that holds some of its experts. A token that visits k of E experts, which n places hold in
equal parts, is wanted by ``distinct_places`` of them in the mean, where every choice of k experts
is as likely as any other; DeepSeek-V3's router first chooses 4 of 8 groups (``GroupLimit``).

Sources: Lepikhin et al. 2020, GShard (arXiv:2006.16668), section 3.3; DeepSeek-AI 2024,
DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import comb, lcm
from typing import Literal, get_args

from .collectives import Group, collective_seconds

Dispatcher = Literal["gather", "alltoall", "deepep", "hybridep"]
"""Method by which tokens are sent to the ranks of their experts: an all-to-all, or kernels of
DeepEP or HybridEP. ``gather``: all ranks gather all tokens and sum the outputs of their own
experts, as this package's runtime does."""

DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)

ROW_COPIES: Mapping[Dispatcher, int] = {"gather": 2, "alltoall": 4, "deepep": 2, "hybridep": 0}
"""Number of copies of a token's row that a rank makes in its own memory on the way to an expert and
back. For NCCL's all-to-all rows are sorted by rank, and received rows by expert; HybridEP's kernels
sort them as they send (deepseek-ai/DeepEP, branch hybrid-ep)."""

Routing = Literal["any", "neighbours"]
"""Choice of the k experts that a token visits. ``any``: every choice is equally likely.
``neighbours``: token after token visits the next k experts, mostly on one host, as with the
balanced gate of NVIDIA's NeMo AutoModel in benchmarks."""

GroupLimit = tuple[int, int]
"""Limit of a router: the number of equal groups of neighbouring experts, and the number of groups
that it first chooses for a token."""

WITHIN_SHARE = 0.75
"""Share of the rate of collectives within a host that DeepEP and HybridEP reach: 494 and 420 GB/s
(DeepEP, on 24 SMs), 536 and 531 (HybridEP, on 16 SMs) of 680 on 8 B200, for 4096 tokens of 7168
numbers in bfloat16 (deepseek-ai/DeepEP, branch hybrid-ep)."""
BETWEEN_SHARE = 0.8
"""Share of the network's rate between hosts that DeepEP and HybridEP reach: HybridEP on 8 hosts of
8 H100 delivers 41 to 48 GB/s of tokens, 7/8 of them over the network of 50 GB/s (same source)."""


def dispatch_seconds(
    num_bytes: float,
    copies: int,
    num_experts: int,
    group: Group,
    dispatcher: Dispatcher,
    routing: Routing = "any",
    limit: GroupLimit = (1, 1),
) -> float:
    """Return the seconds in which each rank of ``group`` sends its tokens to their experts.
    ``num_bytes`` are the bytes of all tokens of one rank; each token visits ``copies`` of the
    ``num_experts`` experts, which are spread evenly over the ranks. ``dispatcher`` is the method
    ("alltoall", …), ``routing`` the rule by which tokens choose experts, ``limit`` the router's
    (number of groups of experts, number of groups that a token may use).

    >>> from ..cluster.cluster import Link
    >>> link = Link("wire", alpha_seconds=0.0, bytes_per_second=1e9)
    >>> dispatch_seconds(1e9, 2, 4, Group(4, 4, 1, link, link), "alltoall")
    1.5
    """
    if group.num_ranks <= 1 or num_bytes <= 0:
        return 0.0
    if dispatcher == "alltoall":
        return collective_seconds("all_to_all", num_bytes * copies, group)
    ranks, hosts = group.num_ranks, group.num_hosts
    on_ranks = _PLACES[routing](ranks, copies, num_experts, limit)
    within = (
        on_ranks * (1 - 1 / group.ranks_per_host) / (WITHIN_SHARE * group.intra.bytes_per_second)
    )
    start = group.intra.base_seconds
    if hosts == 1:
        return start + num_bytes * within
    on_hosts = _PLACES[routing](hosts, copies, num_experts, limit)
    between = on_hosts * (1 - 1 / hosts) / (BETWEEN_SHARE * group.inter.bytes_per_second)
    return max(start, group.inter.base_seconds) + num_bytes * max(within, between)


def hidden_seconds(
    first: float, compute: float, last: float, *, others: float, slowed_share: float, halved: bool
) -> float:
    """Return the seconds of a layer's exchanges that run beside compute. ``first``, ``compute`` and
    ``last`` are seconds of one half if the layer is ``halved``; ``others`` are seconds of the ops
    beside it, ``slowed_share`` the share of its speed that compute loses meanwhile.

    While an exchange runs, compute loses the share a of its speed. So an exchange of m seconds
    beside compute of c seconds takes max(m, c + a·m), and hides min(c, (1 - a)·m).

    Ops that do not depend on the layer run after its first exchange has started (o seconds). In
    halves, of f, c and l seconds each, the first exchanges run beside these ops and the compute of
    the first half, and the exchange back of the first half beside the compute of the second:

        exchange   first 1 | first 2  | last 1    | last 2
        compute    others    half 1   | half 2    |

    The second half can be computed once the first exchanges and half 1 are over, after
    max(f + max(f, c + a·f), 2f, o + c + 2a·f) seconds, and the last exchange can start max(l, c +
    a·l) seconds later. In the backward the same happens in reverse order of time: the exchange of
    the tokens' gradients comes last, beside the backward of the ops that ran first.

    Source: Hwang et al. 2023, "Tutel" (arXiv:2206.03382, section 3.3), splits a layer in parts.

    >>> hidden_seconds(3.0, 5.0, 3.0, others=2.0, slowed_share=0.0, halved=False)
    2.0
    >>> hidden_seconds(3.0, 5.0, 3.0, others=0.0, slowed_share=0.0, halved=True)
    6.0
    """
    free = 1 - slowed_share
    if not halved:
        return min(others, free * first)
    own = min(compute, free * first)
    return min(others + own, 2 * free * first) + min(compute, free * last)


def ring_seconds(
    message: float, step: float, num_ranks: int, *, slowed_share: float, backward: bool
) -> float:
    """Return the seconds that a ring adds to its compute, ``num_ranks`` steps of ``step`` seconds.
    ``message``: seconds in which a rank sends one part and receives another.

    Beside compute of c seconds, messages of m seconds add max(m - c, a·m), with a the share of its
    speed that compute loses meanwhile (``slowed_share``). In the forward a message runs beside each
    step but the last. In the backward the sums of the gradients follow their parts from the second
    step on: of n steps the first, the second and the last run beside one message, the steps between
    them beside two, and the message that brings the sums home beside none.

    Source: Liu et al. 2023, Ring Attention (arXiv:2310.01889, section 3).

    >>> ring_seconds(3.0, 2.0, 4, slowed_share=0.0, backward=False)
    3.0
    >>> ring_seconds(3.0, 2.0, 4, slowed_share=0.0, backward=True)
    10.0
    """

    def added(num_messages: int) -> float:
        seconds = num_messages * message
        return max(seconds - step, slowed_share * seconds)

    if not backward:
        return (num_ranks - 1) * added(1)
    if num_ranks == 2:
        return added(1) + message
    return 3 * added(1) + (num_ranks - 3) * added(2) + message


def distinct_places(
    places: int, copies: int, num_experts: int, limit: GroupLimit = (1, 1)
) -> float:
    """Return the mean number of ranks (or hosts) that hold at least one of a token's ``copies``
    experts. ``places`` is the number of ranks (or hosts); every choice that ``limit`` (groups of
    experts, groups that a token may use) allows is equally likely.

    >>> distinct_places(4, 1, 8), distinct_places(8, 8, 8), round(distinct_places(2, 2, 4), 3)
    (1.0, 8.0, 1.667)
    >>> distinct_places(8, 8, 256, (8, 4)) < 4
    True
    """
    groups, chosen = limit
    of_place = max(1, groups // places)
    of_group = min(num_experts / groups, num_experts / places)
    found = 0.0
    for own in range(1, min(of_place, chosen) + 1):
        likely = comb(of_place, own) * comb(groups - of_place, chosen - own) / comb(groups, chosen)
        pool, elsewhere = num_experts * chosen / groups, 1.0
        for taken in range(copies):
            elsewhere *= max(0.0, (pool - own * of_group - taken) / max(pool - taken, 1.0))
        found += likely * (1 - elsewhere)
    return places * found


@cache
def neighbouring_places(
    places: int, copies: int, num_experts: int, _limit: GroupLimit = (1, 1)
) -> float:
    """Return the mean number of ranks (or hosts) that hold at least one of a token's ``copies``
    experts if token after token visits the next ``copies`` of ``num_experts`` in turn. ``places``
    is the number of ranks (or hosts), which hold equally many experts each.

    >>> neighbouring_places(4, 2, 8), neighbouring_places(8, 4, 8), neighbouring_places(2, 3, 8)
    (1.0, 4.0, 1.5)
    """
    tokens = lcm(copies, num_experts) // copies
    found = 0
    for token in range(tokens):
        visited = ((token * copies + each) % num_experts for each in range(copies))
        found += len({expert * places // num_experts for expert in visited})
    return found / tokens


_PLACES: Mapping[Routing, Callable[[int, int, int, GroupLimit], float]] = {
    "any": distinct_places,
    "neighbours": neighbouring_places,
}
