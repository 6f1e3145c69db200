"""Each use of a tensor from before planning raises AP925."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.calls.stale_tensors import is_retired, retire_tensor
from autoparallel.planner.errors import UsageError

USES: dict[str, Callable[[Tensor], Any]] = {
    "an op": lambda old: old + 1,
    "an argument": lambda old: torch.ones(3, 2) @ old,
    "in a list": lambda old: torch.cat([torch.ones(3), old.view(-1)]),
    "its gradient": lambda old: old.grad,
    "its data": lambda old: old.data,
    "a write": lambda old: old.copy_(torch.ones(3)),
    "a read": lambda old: torch.ones(3).copy_(old),
    "clipping": lambda old: nn.utils.clip_grad_norm_([old], 1.0),
    "numpy": lambda old: old.numpy(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.clone])
def test_a_use_of_an_old_tensor_names_it(use: str, kind: Callable[[Tensor], Tensor]) -> None:
    old = kind(torch.ones(2, 3))
    retire_tensor(old, "Net.weight")
    assert is_retired(old)
    with pytest.raises(UsageError, match=r"AP925.*Net\.weight is used, as it was before"):
        USES[use](old)


def test_an_old_parameter_is_no_more_than_its_form() -> None:
    old = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([old], lr=0.1)
    retire_tensor(old, "Net.weight")
    assert (old.shape, old.numel(), old.dtype) == ((2, 3), 6, torch.float32)
    assert {old: 1}[old] == 1
    assert isinstance(old, nn.Parameter)
    assert repr(old) == "<Net.weight, as it was before the model was planned>"
    for use in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(UsageError, match="AP925"):
            use()


def test_a_gradient_that_reaches_an_old_parameter_raises() -> None:
    old, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    old.register_hook(lambda gradient: pytest.fail("the hook is the shard's now"))
    losses = [(old @ other).square().sum(), old.square().sum(), old.sum()]
    retire_tensor(old, "Net.weight")
    for loss in losses:
        with pytest.raises(UsageError, match="AP925"):
            loss.backward()
