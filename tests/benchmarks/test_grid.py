"""No configuration of a simple grid is faster than the plan."""

from __future__ import annotations

from benchmarks.planning.cases import Case
from benchmarks.planning.grid import ALLOWED, GPT, SETTINGS, Compared, compared

SMALL = Case(
    "small GPT",
    GPT,
    "2x2xA100-40GB",
    16,
    seq=None,
    settings={"d_model": 512, "n_layer": 4, "n_head": 8, "seq": 256},
)


def test_the_plan_of_a_small_model_is_not_beaten() -> None:
    row = compared(SMALL, seconds=20.0)
    assert row.num_priced > 50
    assert not row.is_beaten, (row.lead, row.fastest)


def test_a_lead_above_the_allowed_counts_as_beaten() -> None:
    leads = {tolerance: allowed + 0.001 for tolerance, allowed in ALLOWED.items()}
    row = Compared("", {}, {}, leads, "", 1, 1)
    assert row.is_beaten


def test_there_are_thirty_settings_or_more_with_names_of_their_own() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) >= 30


def test_settings_have_the_lengths_that_their_names_say() -> None:
    lengths = {each.name: each.seq for each in SETTINGS if each.name.startswith("Llama")}
    assert all(name.endswith(f", {seq}") for name, seq in lengths.items())
    assert set(lengths.values()) == {2048, 4096, 8192, 65536, 131072}
