"""Gradients, and parameters under ZeRO 3, in host memory: steps equal one device's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from processes import run_processes
from test_verification import check_verified, num_devices, planned, verify_all

TWO = (
    ("llama", "dp=2,zero=3,microbatches=2,offload=parameters"),
    ("gpt", "dp=2,zero=2,microbatches=4,offload=gradients"),
    ("llama", "dp=2,zero=3,microbatches=1,offload=gradients,recompute=full"),
    ("gpt", "tp=2,microbatches=2,offload=gradients"),
    ("gpt-tied", "pp=2,microbatches=4,schedule=1f1b,offload=gradients"),
    ("dropout", "pp=2,microbatches=4,schedule=zb-h1,offload=gradients"),
)
FOUR = (
    ("llama", "dp=4,zero=3,shard=2,microbatches=2,offload=parameters"),
    ("llama", "dp=4,zero=2,shard=2,microbatches=4,offload=gradients"),
    ("gpt", "dp=2,tp=2,zero=3,microbatches=2,offload=parameters,recompute=selective"),
    ("gpt-tied", "dp=2,pp=2,zero=3,microbatches=4,offload=parameters"),
    ("mixtral", "dp=4,zero=3,microbatches=2,offload=parameters"),
    ("dropout", "dp=2,pp=2,zero=3,microbatches=4,schedule=zb-h1,offload=parameters"),
    ("gpt", "dp=4,zero=3,microbatches=2,offload=parameters,recompute=none-offloaded"),
)


def verified(cases: Sequence[tuple[str, str]]) -> None:
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(num_devices(cases[0][1]), verify_all, plans, timeout_seconds=280)
    for (model, parallel), own in zip(cases, found[0], strict=True):
        print(model, parallel)
        check_verified(own)


def test_states_in_host_memory_on_two_ranks_equal_one_device() -> None:
    verified(TWO)


@pytest.mark.slow
def test_states_in_host_memory_on_four_ranks_equal_one_device() -> None:
    verified(FOUR)
