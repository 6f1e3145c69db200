"""The emulated device takes the modelled time, computes what decides, and keeps shapes."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.regret.device import EmulatedDevice
from benchmarks.regret.page import CHOICE, Row, plot, score, tables

ROWS, WIDTH, RATE = 64, 128, 1e9


def test_products_take_their_flops_forward_and_backward():
    device = EmulatedDevice(RATE, 1e15)
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with device:
        y = F.linear(x, weight)
        assert device.busy_seconds == pytest.approx(2 * ROWS * WIDTH**2 / RATE, rel=1e-3)
        y.backward(torch.ones_like(y))
    assert device.busy_seconds == pytest.approx(3 * 2 * ROWS * WIDTH**2 / RATE, rel=1e-3)
    assert weight.grad.shape == weight.shape
    assert x.grad.shape == x.shape


def test_other_ops_take_the_bytes_that_they_move():
    device = EmulatedDevice(1e15, RATE)
    with device:
        torch.ones(ROWS, WIDTH).add_(1)
    assert device.busy_seconds == pytest.approx(ROWS * WIDTH * 4 / RATE)


def test_the_host_runs_ahead_and_waits_where_it_synchronizes(monkeypatch):
    now, slept = 5.0, []
    clock = SimpleNamespace(monotonic=lambda: now, sleep=slept.append)
    monkeypatch.setattr("benchmarks.regret.device.time", clock)
    device = EmulatedDevice(1e15, 1e6)
    with device:
        torch.ones(ROWS, WIDTH).add_(1)  # 33 ms of the device
        assert not slept
        now += 0.01  # of the host, meanwhile
        device.synchronize()
        assert slept == [pytest.approx(device.busy_seconds - 0.01)]
        now += slept[0]
        device.synchronize()
    assert len(slept) == 1


def test_small_tensors_and_integers_are_computed():
    with EmulatedDevice(RATE, RATE):
        assert (torch.ones(4) * 3).sum().item() == 12
        assert torch.arange(10_000).sum().item() == 49_995_000


def test_in_place_ops_return_what_they_write_to():
    value = torch.ones(ROWS, WIDTH)
    with EmulatedDevice(RATE, RATE):
        assert value.mul_(2) is value
        assert torch.mul(value, 2, out=value) is value


def test_scores_and_pages():
    """By hand: the choice takes 1.1 s where 1.0 s was possible; one pair of three out of order."""
    rows = [
        Row("flat fast", "m", CHOICE, "a", 0.99, [1.0, 1.1, 1.2], 0.5),
        Row("flat fast", "m", "dp=4", "b", 1.2, [1.0], 0.5),
        Row("flat fast", "m", "tp=4", "c", 2.0, [2.0], 0.5),
    ]
    found = score(rows)
    assert found.regret == pytest.approx(0.1)
    assert found.mean_error == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert found.tau == pytest.approx(1 / 3)
    page = "\n".join(tables({"flat fast, m": rows}))
    assert "| flat fast | m | a | 1.100 s | b, 1.000 s | 10.0% | 10.0% | 0.33 |" in page
    assert "3 configurations, mean error 10.0%, bias +3.3%" in page
    assert plot({"flat fast, m": rows}).count("<circle") == 3
