"""Names of ops: their function, with a number."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.+?)(?:_\d+)?")


def base_name(name: str) -> str:
    """Return a node's name without its trailing number.

    >>> base_name("linear_7"), base_name("linear"), base_name("relu_")
    ('linear', 'linear', 'relu_')
    """
    found = _NUMBERED.fullmatch(name)
    assert found is not None
    return found[1]


class Names:
    """Generator of unique names for a graph's nodes, numbered in the order of requests.

    >>> names = Names(["add_1"])
    >>> [names.next(base) for base in ("add", "add", "pow", "add")]
    ['add', 'add_1_', 'pow_1', 'add_2']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def take(self, name: str) -> str:
        """Reserve and return ``name``, with underscores appended until it is unique."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def next(self, base: str) -> str:
        """Return the next unused name for an op named ``base``. As in ``torch.fx``, Python keywords
        and builtins always get a number."""
        number = self._counts.get(base)
        if number is None:
            number = int(keyword.iskeyword(base) or hasattr(builtins, base))
        self._counts[base] = number + 1
        return self.take(f"{base}_{number}" if number else base)
