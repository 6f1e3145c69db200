"""A layer of experts as one op: ``autoparallel::experts``.

Each token t goes through the k experts that ``ids`` names and comes back as the sum of
their results, weighted by ``scores``:

    y_t = Σ_j scores_tj · (act(x_t · up_e + b_e) · down_e + c_e)   with e = ids_tj

Tokens do not meet, so the op is split by tokens; and it is a sum over experts, so it is split by
experts: each rank computes the addition of its own experts, a partial sum. An id outside of these
adds nothing. On an axis that splits both, a row for each (token, expert) is sent to the rank of its
expert and the result is sent back (Lepikhin et al. 2020, GShard, section 3.3); no expert weight
moves. Rows are sorted by expert and multiplied in groups (Gale et al. 2022, MegaBlocks), so
no expert computes a row that is not its own.

``activation`` is a function of rows as text (``activation.py``). ``transposed`` weights are
(expert, in, out), others (expert, out, in).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .activation import activate
from .collectives import Exchange, Parts, Placed, Rank, arrived, exchange, place_along, send
from .local_loss import part_of

SCHEMA = (
    "(Tensor x, Tensor ids, Tensor scores, Tensor up, Tensor down, Tensor? up_bias=None, "
    "Tensor? down_bias=None, *, str activation, int num_experts, bool transposed=False) -> Tensor"
)


def run_experts(
    x: Tensor,
    ids: Tensor,
    scores: Tensor | None,
    *weights: Tensor | None,
    activation: str,
    transposed: bool,
    first: int = 0,
    match: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return for each token the sum of its experts' outputs, weighted by ``scores`` (1 if None);
    only experts ``first`` … ``first`` + E − 1 count. ``match`` changes the columns of the first
    product, before the activation. ``x`` is (T, in), ``ids`` (experts) and
    ``scores`` are (T, k), the result is (T, out); T stands for one or several dimensions of tokens.
    ``weights`` are up (E, in, width), down (E, width, out) and their biases or None."""
    up, down, up_bias, down_bias = (*weights, None, None)[:4]
    assert up is not None
    assert down is not None
    if not transposed:
        up, down = up.transpose(-2, -1), down.transpose(-2, -1)
    count, chosen = up.shape[0], ids.shape[-1]
    own = ids.reshape(-1) - first
    own = torch.where((own >= 0) & (own < count), own, count)
    of_row, places = own.sort(stable=True)
    groups = _Groups.of(of_row, count)
    rows = x.reshape(-1, x.shape[-1])[places // chosen].masked_fill_(groups.absent, 0)
    rows = groups.product(rows, up, up_bias)
    rows = activate(activation, rows if match is None else match(rows))
    rows = groups.product(rows, down, down_bias)
    if scores is not None:
        rows = rows * scores.reshape(-1)[places].unsqueeze(-1)
    spread = torch.empty_like(rows).index_copy(0, places, rows)
    return spread.view(*ids.shape, rows.shape[-1]).sum(-2).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Grouping of N rows (token and expert), sorted by expert: rows of this rank's E experts, then
    rows of other ranks' experts, which ``absent`` (N, 1) marks. ``experts`` (N) has each row's
    expert, E - 1 for absent rows; ``ends`` (E, int32) the end of each expert's rows. The host never
    reads these tensors, as it would have to wait for the device. Results and gradients of absent
    rows are arbitrary until they are masked."""

    experts: Tensor
    absent: Tensor
    ends: Tensor

    @staticmethod
    def of(of_row: Tensor, count: int) -> _Groups:
        """Return the grouping of N rows sorted by expert; ``of_row`` (N) has each row's expert, or
        ``count`` for experts of other ranks."""
        every = torch.arange(count, device=of_row.device, dtype=of_row.dtype)
        ends = torch.searchsorted(of_row, every, right=True, out_int32=True)
        return _Groups(of_row.clamp(max=count - 1), (of_row == count).unsqueeze(-1), ends)

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply each row of ``rows`` (N, in) by its expert's ``weight`` (E, in, out) and add its
        expert's bias; return (N, out)."""
        if _has_kernel(rows, weight):
            made = functional.grouped_mm(rows, weight, offs=self.ends)
        else:
            made = self._product_of_blocks(rows, weight)
        if bias is not None:
            made = made + bias[self.experts]
        return made.masked_fill_(self.absent, 0)

    def _product_of_blocks(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply each row by its expert's weight, as a batched product of blocks of B = ceil(N /
        E) rows, to which each expert's rows are padded. At most E + ceil(N / B) <= 2E blocks are
        needed for any distribution of rows, so shapes do not depend on values."""
        num_rows, count = rows.shape[0], weight.shape[0]
        size = max(1, -(-num_rows // count))
        num_blocks = count + -(-num_rows // size)
        starts = functional.pad(self.ends, (1, 0))[:-1]
        needed = (self.ends - starts + size - 1) // size
        block_ends = needed.cumsum(0)
        moved = (block_ends - needed) * size - starts
        places = torch.arange(num_rows, device=rows.device) + moved[self.experts]
        places = torch.where(self.absent.squeeze(-1), num_blocks * size, places)
        blocks = rows.new_zeros(num_blocks * size + 1, rows.shape[1]).index_copy(0, places, rows)
        every = torch.arange(num_blocks, device=rows.device)
        of_block = torch.searchsorted(block_ends, every, right=True).clamp(max=count - 1)
        made = blocks[:-1].view(num_blocks, size, -1) @ weight[of_block]
        return made.flatten(0, 1)[places.clamp(max=num_blocks * size - 1)]


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's ``grouped_mm`` can multiply these tensors without the host waiting for
    sizes of groups: bfloat16 on CUDA, or bfloat16 and float32 on a CPU, with rows of multiples of
    16 bytes."""
    dtypes = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float32)
    aligned = all(size * rows.itemsize % 16 == 0 for size in weight.shape[1:])
    return rows.dtype in dtypes and rows.shape[0] > 0 and aligned


class Slices(NamedTuple):
    """Slices of each expert's inner width, over mesh axes ``axes``; on the axes ``gathered`` among
    them each rank has its own tokens. ``halves``: the first product has two halves of columns, from
    which the activation reads the same column (gate and up, one after the other)."""

    axes: tuple[int, ...]
    gathered: tuple[int, ...] = ()
    halves: bool = False

    def held(self, rank: Rank, weights: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return a rank's slices of the weights, with its share of the bias of the results, which
        no axis slices."""
        *sliced, bias = (*weights, None, None)[:4]
        parts = prod(map(rank.communicator.size, self.axes))
        return (*sliced, None if bias is None else bias / parts)

    def match(self, rank: Rank) -> Callable[[Tensor], Tensor] | None:
        """Return the function that exchanges columns between the ranks, such that each has the same
        columns of both halves; None if each rank's columns belong together."""
        return partial(_matching_halves, rank, self.axes) if self.halves else None


def _matching_halves(rank: Rank, axes: tuple[int, ...], columns: Tensor) -> Tensor:
    """Return this rank's columns of both halves of a matrix (N, C), one half after the other.

    Of n ranks along mesh axes ``axes``, rank r holds the columns 2r and 2r + 1, counted in blocks
    of C / 2. Block b is that of rank b mod n.
    """
    count = prod(map(rank.communicator.size, axes))
    place = place_along(rank.communicator, axes)
    blocks = columns.view(len(columns), 2, columns.shape[-1] // 2).permute(1, 2, 0)
    targets = [2 * place % count, (2 * place + 1) % count]
    sources = [place // 2, (count + place) // 2]
    if targets[0] > targets[1]:
        blocks = blocks.flip(0)
    sent, received = (tuple(each.count(of) for of in range(count)) for each in (targets, sources))
    blocks = exchange(rank, blocks, Parts(lambda: (sent, received, ())), axes)
    return blocks.flatten(0, 1).t()


def count_routed(rank: Rank, ids: Tensor, layer: str, num_experts: int) -> None:
    """Add the tokens of each expert among ``ids`` (experts) to the counts of ``layer``, if the rank
    counts them. A forward that a backward repeats is not counted again. The host never waits."""
    routed, is_backward = rank.draws.routed, torch._C._current_graph_task_id() != -1
    if routed is None or is_backward:
        return
    if layer not in routed:
        routed[layer] = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    chosen = ids.reshape(-1)
    routed[layer].index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))


def split_experts(
    rank: Rank,
    x: Tensor,
    ids: Tensor,
    scores: Tensor | None,
    *weights: Tensor | None,
    axes: tuple[int, ...],
    slices: Slices | None = None,
    counted: tuple[str, int] | None = None,
    **options: Any,
) -> Tensor:
    """Compute for each token the weighted sum of the outputs of this rank's experts. Experts are
    split over mesh axes ``axes``, and each of them as ``slices`` says, so the results are partial
    sums. ``counted``: name and number of experts of the layer if this rank counts its tokens."""
    if counted is not None:
        count_routed(rank, ids, *counted)
    first = _first_expert(rank, weights, axes)
    if slices is not None:
        weights, options["match"] = slices.held(rank, weights), slices.match(rank)
    return run_experts(x, ids, scores, *weights, first=first, **options)


def _first_expert(rank: Rank, weights: tuple[Tensor | None, ...], axes: tuple[int, ...]) -> int:
    """Return the number of this rank's first expert; experts are split over mesh axes ``axes``."""
    assert weights[0] is not None
    first, _ = part_of(rank, weights[0].shape[0], axes)
    return first


class Sending(NamedTuple):
    """Way in which tokens are sent to experts, which are split over mesh axes ``axes``. Tokens are
    split over the axes ``sent`` among them, and travel in ``num_parts`` exchanges of equally many
    rows. Ranks along ``gathered`` hold slices of the same experts, so they tell each other their
    counts. ``counted``: as for ``split_experts``. ``placed``: experts that not only their owner
    computes (see ``_Placed``)."""

    axes: tuple[int, ...]
    sent: tuple[int, ...]
    gathered: tuple[int, ...] = ()
    num_parts: int = 1
    counted: tuple[str, int] | None = None
    placed: Placed = ()


@dataclass(frozen=True, slots=True)
class SentTokens:
    """Tokens of one layer on their way to their experts, as N rows (token and expert) that travel
    in P exchanges. ``order`` (N) has the number of each sent row among the rows in the order of the
    tokens. Received rows come in C classes for each of R ranks: ``experts`` (R · C) has the expert
    of each class, ``received`` (R, P, C) its number of rows. ``placing``: the placement of experts
    if not only their owners compute them."""

    order: Tensor
    exchanges: tuple[Exchange, ...]
    experts: Tensor
    received: Tensor
    placing: _Placed | None


def send_tokens(rank: Rank, x: Tensor, ids: Tensor, *, held: int, sending: Sending) -> SentTokens:
    """Start to send each of this rank's tokens to its experts, of which each rank holds ``held``;
    ``finish_experts`` waits for them."""
    sending = Sending(*sending)  # graphs hold plain tuples
    axes, sent, num_parts = sending.axes, sending.sent, sending.num_parts
    if sending.counted is not None:
        count_routed(rank, ids, *sending.counted)
    places, place = _by_rank(rank, held, axes, sent, ids.device)
    num_ranks, num_places = places.shape
    placing = _Placed.of(sending.placed, num_ranks, held, place) if sending.placed else None
    if placing is not None:
        num_places = placing.size
        slots, experts = placing.slots(ids), torch.arange(num_places, device=ids.device)
    else:
        every = torch.arange(places.numel(), device=ids.device)
        slots = torch.empty_like(every).index_copy(0, places.reshape(-1), every)[ids]
        experts = places[place]
    count, num_rows, width = num_ranks * num_places, ids.numel(), x.shape[-1]
    every = torch.arange(num_parts * count, device=ids.device)
    part = torch.arange(num_rows, device=ids.device) * num_parts // max(num_rows, 1)
    wanted, order = (part * count + slots.reshape(-1)).sort(stable=True)
    ends = torch.searchsorted(wanted, every, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1)).view(num_parts, num_ranks, num_places)
    counts = counts.transpose(0, 1).contiguous()
    parts, received = rank.communicator.parts(counts, sent, sending.gathered)
    rows = x.unsqueeze(-2).expand(*ids.shape, width).reshape(-1, width)[order]
    starts = [-(-num_rows * at // num_parts) for at in range(num_parts + 1)]
    sizes = [end - start for start, end in pairwise(starts)]
    pieces = torch.split(rows, sizes) if num_parts > 1 else (rows,)
    pairs = zip(pieces, parts, strict=True)
    exchanges = tuple(send(rank, own, of_ranks, sent) for own, of_ranks in pairs)
    return SentTokens(order, exchanges, experts.repeat(len(received)), received, placing)


def finish_experts(
    rank: Rank,
    tokens: SentTokens,
    scores: Tensor,
    *weights: Tensor | None,
    axes: tuple[int, ...],
    slices: Slices | None = None,
    **options: Any,
) -> Tensor:
    """Compute for each of the tokens that this rank sent (``send_tokens``) the weighted sum of its
    experts' outputs. While the experts compute the rows of one exchange, the rows of the next are
    under way to them, and the results of the one before on their way back."""
    first = _first_expert(rank, weights, axes)
    if tokens.placing is not None:
        weights, first = tuple(tokens.placing.weight(rank, each, axes) for each in weights), 0
    if slices is not None:
        weights, options["match"] = slices.held(rank, weights), slices.match(rank)
    gathered = () if slices is None else slices.gathered
    copies = prod(map(rank.communicator.size, gathered))
    returning = []
    for sending, counts in zip(tokens.exchanges, tokens.received.unbind(1), strict=True):
        rows = arrived(sending)
        if gathered:
            rows = exchange(rank, rows.repeat(copies, 1), sending.parts.copies(), gathered)
        own = tokens.experts.repeat_interleave(counts.reshape(-1), output_size=rows.shape[0])
        made = run_experts(rows, own.unsqueeze(-1), None, *weights, first=first, **options)
        if gathered:
            made = exchange(rank, made, sending.parts.copies().back(), gathered)
            made = made.view(copies, -1, made.shape[-1]).sum(0)
        returning.append(send(rank, made, sending.parts.back(), sending.axes))
    results = [arrived(each) for each in returning]
    made = results[0] if len(results) == 1 else torch.cat(results)
    made = torch.empty_like(made).index_copy(0, tokens.order, made)
    weighted = made.view(*scores.shape, made.shape[-1]) * scores.unsqueeze(-1)
    return weighted.sum(-2).to(made.dtype)


def sent_experts(
    rank: Rank,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    *weights: Tensor | None,
    sending: Sending,
    **options: Any,
) -> Tensor:
    """Compute for each of this rank's tokens the weighted sum of its experts' outputs. Tokens are
    sent to their experts as ``sending`` says; over other mesh axes that split experts the results
    are partial sums. The ranks that hold ``slices`` of the same experts then gather each other's
    rows, and sum the results."""
    assert weights[0] is not None
    tokens = send_tokens(rank, x, ids, held=weights[0].shape[0], sending=sending)
    return finish_experts(rank, tokens, scores, *weights, **options)


def _by_rank(
    rank: Rank, held: int, axes: tuple[int, ...], sent: tuple[int, ...], device: torch.device
) -> tuple[Tensor, int]:
    """Return the experts of each rank along mesh axes ``sent`` together (ranks, experts), whichever
    rank of the other axes holds them, and this rank's place. Experts are split over ``axes``,
    ``held`` on each rank."""
    sizes = [rank.communicator.size(axis) for axis in axes]
    outer = [axes.index(axis) for axis in sent]
    inner = [place for place, axis in enumerate(axes) if axis not in sent]
    every = torch.arange(held * prod(sizes), device=device).view(*sizes, held)
    of_ranks = every.permute(*outer, *inner, len(axes))
    place = place_along(rank.communicator, sent)
    return of_ranks.reshape(prod(sizes[each] for each in outer), -1), place


@dataclass(frozen=True, slots=True)
class _Placed:
    """Placement of a layer's experts on ranks that each own equal, consecutive parts of them: the
    slots of each expert among the ``size`` slots of each rank. This rank keeps the experts
    ``kept``, numbered among its own, and sends the experts ``moved``.

    Parameters stay with the owners. Each forward sends copies of their weights, and the backward
    sends the gradients back, which add up at the owner.
    """

    of_expert: tuple[tuple[int, ...], ...]
    size: int
    kept: tuple[int, ...]
    moved: tuple[int, ...]
    parts: Parts

    @staticmethod
    @cache
    def of(placed: Placed, num_ranks: int, held: int, place: int) -> _Placed:
        """Return the placement for rank ``place`` of ``num_ranks``, which own ``held`` experts
        each. All experts but ``placed`` are computed by their owners."""
        places = dict(placed)
        ranks = [places.get(expert, (expert // held,)) for expert in range(num_ranks * held)]
        # By owner and rank, the experts that the rank computes; it has its own ones first.
        moved = [
            [
                [e for e in range(owner * held, (owner + 1) * held) if to in ranks[e]]
                for to in range(num_ranks)
            ]
            for owner in range(num_ranks)
        ]
        of_expert: list[list[int]] = [[] for _ in ranks]
        size = max(sum(len(moved[o][to]) for o in range(num_ranks)) for to in range(num_ranks))
        for to in range(num_ranks):
            owners = (to, *(owner for owner in range(num_ranks) if owner != to))
            for at, expert in enumerate(e for owner in owners for e in moved[owner][to]):
                of_expert[expert].append(to * size + at)
        others = [to for to in range(num_ranks) if to != place]
        sent = tuple(len(moved[place][to]) * (to != place) for to in range(num_ranks))
        received = tuple(len(moved[to][place]) * (to != place) for to in range(num_ranks))
        return _Placed(
            tuple(map(tuple, of_expert)),
            size,
            tuple(expert - place * held for expert in moved[place][place]),
            tuple(expert - place * held for to in others for expert in moved[place][to]),
            Parts(lambda: (sent, received, ())),
        )

    def slots(self, ids: Tensor) -> Tensor:
        """Return for each token (tokens, k) the slots of its experts ``ids``, numbered over all
        ranks. Tokens take the slots of an expert in turn."""
        longest = max(map(len, self.of_expert))
        padded = [[*each, *[0] * (longest - len(each))] for each in self.of_expert]
        table = torch.tensor(padded, device=ids.device)
        lengths = torch.tensor([len(each) for each in self.of_expert], device=ids.device)
        tokens = torch.arange(ids[..., 0].numel(), device=ids.device).view(*ids.shape[:-1], 1)
        return table[ids, tokens % lengths[ids]]

    def weight(self, rank: Rank, weight: Tensor | None, axes: tuple[int, ...]) -> Tensor | None:
        """Return the weights of the experts in this rank's slots; ``weight`` has those that it
        owns. ``axes``: mesh axes of the ranks."""
        if weight is None:
            return None
        rows = weight[torch.tensor(self.moved, dtype=torch.int64, device=weight.device)]
        rows = exchange(rank, rows.flatten(1), self.parts, axes)
        kept = weight
        if len(self.kept) < weight.shape[0]:
            kept = weight[torch.tensor(self.kept, dtype=torch.int64, device=weight.device)]
        return torch.cat((kept, rows.view(-1, *weight.shape[1:])))


@torch.library.custom_op("autoparallel::experts", mutates_args=(), schema=SCHEMA)
def experts(  # noqa: PLR0913 - the schema
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    num_experts: int,
    transposed: bool = False,
) -> Tensor:
    """Compute a mixture-of-experts layer on whole tensors: for each token of ``x`` (T, in) the
    outputs of experts ``ids`` (T, k), weighted by ``scores`` (T, k). T: one or more dimensions."""
    return run_experts(
        x, ids, scores, up, down, up_bias, down_bias, activation=activation, transposed=transposed
    )


@experts.register_fake
def _(
    x: Tensor, ids: Tensor, scores: Tensor, up: Tensor, down: Tensor, *_: Any, **__: Any
) -> Tensor:
    return torch.empty_like(x)


def _remember(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = {name: keyword_only_inputs[name] for name in ("activation", "transposed")}


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the op ``experts``, by computing its forward again."""
    copies = [
        None if t is None else t.detach().requires_grad_(needed)
        for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    ]
    with torch.enable_grad():
        made = run_experts(*copies, **ctx.options)  # type: ignore[arg-type]
    wanted = [t for t in copies if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(made, wanted, gradient))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in copies)


experts.register_autograd(_backward, setup_context=_remember)
