"""The list of deliberate faults still fits the source."""

from collections import Counter
from pathlib import Path

from benchmarks.faults.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_changes_one_place_and_names_tests_that_exist():
    for fault in FAULTS:
        assert (ROOT / fault.path).read_text().count(fault.old) == 1, fault.name
        assert fault.old != fault.new
        assert all((ROOT / test).exists() for test in fault.tests.split()), fault.name


def test_every_package_has_ten_faults():
    rooms = ("planner", "cost_model", "passes", "runtime", "api")
    assert Counter(fault.room for fault in FAULTS) == dict.fromkeys(rooms, 10)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
