"""Nested states come back from JSON and tensors as they were."""

from __future__ import annotations

import enum
import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.checkpoint.optimizer_state import TAG, decode, encode


class Mode(enum.IntEnum):
    WARM = 3


def there_and_back(value: Any) -> Any:
    tensors: list[Tensor] = []
    text = json.dumps(encode(value, tensors, "state"))
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "text"], "b": {"c": (1, (2, 3))}},
        {1: "one", 2.5: {"nested": 1}, None: 0},
        {(1, "a"): 2},
        {TAG: "a key that stands for something else", "b": 1},
        {1, 2, 3},
        b"bytes \x00\xff",
        [torch.float32, torch.bfloat16, torch.int64],
        Counter({"seen": 3, 5: 1}),
        OrderedDict(last_epoch=3),
    ],
)
def test_a_state_comes_back_equal_and_of_its_kind(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is (dict if isinstance(value, OrderedDict) else type(value))


def test_numbers_of_numpy_and_of_enums_come_back_as_numbers_of_python() -> None:
    found = there_and_back([np.float64(0.5), np.int64(3), np.bool_(True), np.array(2), Mode.WARM])
    assert found == [0.5, 3, True, 2, 3]
    assert [type(each) for each in found] == [float, int, bool, int, int]


def test_tensors_are_kept_apart_without_their_gradients() -> None:
    tensors: list[Tensor] = []
    weight = torch.ones(2, requires_grad=True)
    text = encode({"moments": [weight, torch.zeros(3)]}, tensors, "state")
    assert "1." not in json.dumps(text)
    assert [each.requires_grad for each in tensors] == [False, False]
    found = decode(text, tensors)
    assert found["moments"][0].tolist() == [1.0, 1.0]
    assert found["moments"][1].tolist() == [0.0, 0.0, 0.0]


def test_a_value_that_only_code_could_restore_is_refused_by_its_place() -> None:
    with pytest.raises(UsageError, match=r"state\.groups\[1\]\.rule is a function") as raised:
        encode({"groups": [1, {"rule": there_and_back}]}, [], "state")
    assert raised.value.code == "AP882"
