"""Seconds of an exchange of tokens with their experts that compute beside it hides.

In: seconds of the exchange that is nearer to the ops beside the layer, of the experts' compute, and
of the other exchange. Out: the seconds by which the layer is shorter than their sum.

While an exchange runs, compute loses the share a of its speed. So an exchange of m seconds beside
compute of c seconds takes max(m, c + a·m), and hides min(c, (1 - a)·m).

A layer sends its rows, computes them and sends them back. Ops that do not depend on the layer run
after its first exchange has started (o seconds). In halves, of f, c and l seconds each, the first
exchanges run beside these ops and the compute of the first half, and the exchange back of the first
half beside the compute of the second:

    exchange   first 1 | first 2  | last 1    | last 2
    compute    others    half 1   | half 2    |

The second half can be computed once both first exchanges and half 1 are over, after
max(f + max(f, c + a·f), max(2f, o + c + 2a·f)) seconds, and the last exchange can start
max(l, c + a·l) seconds later. In the backward the same happens in reverse order of time: the
exchange of the tokens' gradients comes last, beside the backward of the ops that ran first.

Source: Hwang et al. 2023, "Tutel" (arXiv:2206.03382, section 3.3), splits a layer in such parts.
"""

from __future__ import annotations


def hidden_seconds(
    first: float, compute: float, last: float, *, others: float, slowed_share: float, halved: bool
) -> float:
    """Return the seconds of a layer's exchanges that run beside compute. ``first``, ``compute`` and
    ``last`` are seconds of one half if the layer is ``halved``; ``others`` are seconds of the ops
    beside it, ``slowed_share`` the share of its speed that compute loses meanwhile.

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
