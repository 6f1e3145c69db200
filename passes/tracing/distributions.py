"""The random functions of torch, written with counted uniform numbers (see ``random_ops``).

Each function here replaces the function of torch that ``DISTRIBUTIONS`` names and takes its
arguments after a source of counted numbers. As in torch, there are no gradients with respect to
parameters. In half precision the numbers are computed in float32 and rounded at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_STEP = 2.0**-24
"""Distance between neighbouring uniform random numbers."""
_FINE_ABOVE = 2**16
"""Size of a range of integers above which two uniform numbers are drawn for each integer, so that
all are equally likely."""


class Source(Protocol):
    """Function that draws new random numbers in [0, 1) of the shape and dtype of a tensor."""

    def uniform(self, like: Tensor) -> Tensor: ...


def _uniform(source: Source, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * source.uniform(_floats(like))


def normal(source: Source, like: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    """Draw normal random numbers of the shape of ``like``, each from two uniform numbers of
    ``source`` (Box and Muller 1958)."""
    floats = _floats(like)
    radius = (-2 * torch.log1p(-source.uniform(floats))).sqrt()
    standard = radius * torch.cos(2 * math.pi * source.uniform(floats))
    scaled: Tensor = mean + std * standard
    return scaled


def _exponential(source: Source, like: Tensor, lambd: float = 1.0) -> Tensor:
    """Draw exponential random numbers above 0, so that a quotient by them is finite."""
    return (-torch.log1p(-source.uniform(_floats(like)))).clamp_min(_STEP / 2) / lambd


def _log_normal(source: Source, like: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return normal(source, like, mean, std).exp()


def _cauchy(source: Source, like: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * torch.tan(math.pi * (source.uniform(_floats(like)) - 0.5))


def _geometric(source: Source, like: Tensor, p: float) -> Tensor:
    trials = torch.log1p(-source.uniform(_floats(like))) / math.log1p(-p)
    return trials.floor() + 1


def _integers(source: Source, like: Tensor, low: Any, high: Any = None) -> Tensor:
    """Draw random integers from ``low`` to ``high - 1``, or from 0 to ``low - 1``, in float64."""
    low, high = (0, low) if high is None else (low, high)
    doubles = torch.zeros_like(like, dtype=torch.float64)
    drawn = source.uniform(doubles)
    if isinstance(high, Tensor) or high - low > _FINE_ABOVE:
        drawn = drawn + _STEP * source.uniform(doubles)
    integers: Tensor = (drawn * (high - low)).floor() + low
    return integers


def _floats(like: Tensor) -> Tensor:
    """Return zeros of the shape of ``like``, in the dtype in which random numbers are computed."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _in_place(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(source: Source, input: Tensor, *args: Any, **options: Any) -> Tensor:
        return input.copy_(draw(source, input.detach(), *args, **_without_generator(options)))

    return fill


def _without_generator(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "generator"}


def _random_(source: Source, input: Tensor, *bounds: Any, **options: Any) -> Tensor:
    """Fill ``input`` with random integers as ``Tensor.random_(from, to)`` does; without bounds, in
    the full range of a dtype, it is not supported."""
    named = [options[name] for name in ("from", "to") if name in options]
    if not bounds and not named:
        return input.random_()
    return input.copy_(_integers(source, input.detach(), *bounds, *named))


def _rand(source: Source, *size: Any, **options: Any) -> Tensor:
    return source.uniform(torch.zeros(*size, **_without_generator(options)))


def _rand_like(source: Source, input: Tensor, **options: Any) -> Tensor:
    return source.uniform(torch.zeros_like(input, **_without_generator(options)))


def _randn(source: Source, *size: Any, **options: Any) -> Tensor:
    like = torch.zeros(*size, **_without_generator(options))
    return normal(source, like).to(like.dtype)


def _randn_like(source: Source, input: Tensor, **options: Any) -> Tensor:
    like = torch.zeros_like(input, **_without_generator(options))
    return normal(source, like).to(like.dtype)


def _randint(source: Source, *args: Any, **options: Any) -> Tensor:
    """Draw random integers as ``torch.randint(low=0, high, size)`` does."""
    given, named = list(args), _without_generator(options)
    size = named.pop("size") if "size" in named else given.pop()
    high = named.pop("high") if "high" in named else given.pop()
    low = named.pop("low") if "low" in named else given.pop() if given else 0
    like = torch.zeros(size, **{"dtype": torch.int64, **named})
    return _integers(source, like, low, high).to(like.dtype)


def _randint_like(source: Source, input: Tensor, *bounds: Any, **options: Any) -> Tensor:
    named = _without_generator(options)
    limits = [*bounds, *(named.pop(name) for name in ("low", "high") if name in named)]
    like = torch.zeros_like(input, **named)
    return _integers(source, like, *limits).to(like.dtype)


def _randperm(source: Source, n: int, **options: Any) -> Tensor:
    like = torch.zeros(n, **{"dtype": torch.int64, **_without_generator(options)})
    doubles = torch.zeros_like(like, dtype=torch.float64)
    keys = source.uniform(doubles) + _STEP * source.uniform(doubles)
    return keys.argsort().to(like.dtype)


def _bernoulli(source: Source, input: Tensor, p: Any = None, **options: Any) -> Tensor:
    drawn = source.uniform(_floats(input))
    return (drawn < (input.detach() if p is None else p)).to(input.dtype)


def _bernoulli_(source: Source, input: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    return input.copy_(source.uniform(_floats(input)) < p)


def _normal(
    source: Source,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    if size is None:
        like = torch.zeros_like(mean + std)
    else:
        like = torch.zeros(size, **_without_generator(options))
    return normal(source, like, mean, std).to(like.dtype)


def _multinomial(
    source: Source, input: Tensor, num_samples: int, replacement: bool = False, **options: Any
) -> Tensor:
    """Draw random indices along the last dimension, with probabilities in proportion to ``input``.
    Without replacement: an exponential random number is divided by each weight, and the indices of
    the smallest quotients are returned, in order (Efraimidis and Spirakis 2006, "Weighted random
    sampling with a reservoir")."""
    weights = input.detach().to(torch.float64)
    if not replacement or num_samples == 1:
        keys = _exponential(source, weights) / weights
        return keys.topk(num_samples, dim=-1, largest=False).indices
    summed = weights.cumsum(-1)
    drawn = source.uniform(weights.new_zeros((*weights.shape[:-1], num_samples)))
    below = summed.unsqueeze(-2) <= (drawn * summed[..., -1:]).unsqueeze(-1)
    return below.sum(-1)


def _gumbel_softmax(
    source: Source,
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:
    noise = -_exponential(source, logits).log().to(logits.dtype)
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    largest = soft.argmax(dim, keepdim=True)
    return torch.zeros_like(logits).scatter(dim, largest, 1.0) - soft.detach() + soft


DISTRIBUTIONS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.rand_like: _rand_like,
    torch.randn: _randn,
    torch.randn_like: _randn_like,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    functional.gumbel_softmax: _gumbel_softmax,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.random_: _random_,
    torch.Tensor.uniform_: _in_place(_uniform),
    torch.Tensor.normal_: _in_place(normal),
    torch.Tensor.exponential_: _in_place(_exponential),
    torch.Tensor.log_normal_: _in_place(_log_normal),
    torch.Tensor.cauchy_: _in_place(_cauchy),
    torch.Tensor.geometric_: _in_place(_geometric),
}
