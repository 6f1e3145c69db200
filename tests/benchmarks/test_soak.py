"""The soak test notices what grows, and only that."""

import random

import pytest

from benchmarks.soak.growth import Series, growths

MIB = 2**20
SECONDS = [2.0 * number for number in range(200)]


def test_noise_and_single_samples_are_no_growth():
    chance = random.Random(0)
    memory = [400 * MIB + chance.uniform(-5, 5) * MIB for _ in SECONDS]
    memory[::10] = [800 * MIB] * 20
    found = growths(Series(SECONDS, memory), "memory")
    assert found is not None
    assert not found.grows


def test_a_warm_up_is_no_growth():
    memory = [400 * MIB + min(number, 40) * MIB for number in range(len(SECONDS))]
    found = growths(Series(SECONDS, memory), "memory")
    assert found is not None
    assert (found.growth, found.grows) == (0.0, False)


@pytest.mark.parametrize(
    ("quantity", "step"), [("memory", 0.05 * MIB), ("files", 0.02), ("threads", 0.02)]
)
def test_a_leak_is_noticed_under_noise(quantity, step):
    chance = random.Random(0)
    noise = MIB if quantity == "memory" else 0.4
    values = [10 + number * step + chance.uniform(-noise, noise) for number in range(len(SECONDS))]
    found = growths(Series(SECONDS, values), quantity)
    assert found is not None
    assert found.grows


def test_too_few_samples_say_nothing():
    assert growths(Series([0.0, 2.0], [1.0, 2.0]), "memory") is None
    assert growths(Series([], []), "memory") is None
