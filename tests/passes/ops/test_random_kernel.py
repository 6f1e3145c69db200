"""The one kernel draws what ``random_ops`` draws, bit for bit: in Triton's interpreter, if it is
installed, in a process of its own, since the interpreter is chosen as Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = (
    (),
    (1,),
    (7,),
    (1025,),
    (5, 3),
    (4, 5, 33),
    (3, 1, 5, 7),
    (2, 3, 2, 3, 5),
    (2, 1, 3, 2, 2, 9),
)
STARTS = (0, 3, 5_000_000_000)
DTYPES = ("float32", "float16")
"""Not bfloat16: the interpreter cuts floats off where a GPU, as PyTorch, rounds them."""


def compare() -> None:
    import torch

    from autoparallel.passes.ops import random_kernel, random_ops
    from autoparallel.passes.ops.random_kernel import draw

    assert max(map(len, CASES)) == random_kernel.MAX_DIMS
    count = 0
    for shape in CASES:
        for first in STARTS:
            start = [first + dim for dim in range(len(shape))]
            options = {"number": 3, "key": -12345678901234567, "start": start}
            seeds = random_ops._seeds(3, -12345678901234567)
            for dtype in DTYPES:
                x = torch.randn(shape).to(getattr(torch, dtype))
                for p in (0.1, 0.5, 1.0):
                    limit = min(round((1 - p) * (1 << 32)) - (1 << 31), (1 << 31) - 1)
                    scale = 1 / (1 - p) if p < 1 else 0.0
                    found = draw(x, start, seeds=seeds, threshold=limit, scale=scale, drops=True)
                    expected = torch.ops.autoparallel.counter_dropout(x, p, **options)
                    assert _same(found, expected), (shape, first, dtype, p)
                    count += 1
            numbers = torch.empty(shape)
            expected = torch.ops.autoparallel.counter_uniform(numbers, **options)
            found = draw(numbers, start, seeds=seeds, threshold=0, scale=2.0**-24, drops=False)
            assert _same(found, expected), (shape, first)
    x = torch.randn(2, 3000).bfloat16() + 3
    seeds = random_ops._seeds(0, 1)
    found = draw(x, None, seeds=seeds, threshold=0, scale=2.0, drops=True)
    expected = torch.ops.autoparallel.counter_dropout(x, 0.5, number=0, key=1)
    assert torch.equal(found == 0, expected == 0)
    print(count)


def _same(found: object, expected: object) -> bool:
    import torch

    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    return torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def test_the_kernel_draws_the_same_bits() -> None:
    pytest.importorskip("triton")
    found = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert int(found.stdout) == len(CASES) * len(STARTS) * len(DTYPES) * 3


if __name__ == "__main__":
    compare()
