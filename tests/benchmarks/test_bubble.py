"""The emulation of pipelines runs on the loopback: counts, and what follows from its own inputs."""

import io
import json
import signal
import subprocess
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
from forked_interpreters import ForkedInterpreter

from benchmarks.pipelines import bubble

COUNT = 4
COUNTS = {
    # forwards, backwards or their halves, and messages between four ranks
    "gpipe": (2 * 4 * COUNT, 2 * 3 * COUNT),
    "zb-h1": (3 * 8 * COUNT, 2 * 7 * COUNT),
    "interleaved": (2 * 8 * COUNT, 2 * 7 * COUNT),
    "zbv": (3 * 8 * COUNT, 2 * 6 * COUNT),
}


class ForkedRank(ForkedInterpreter):
    """An interpreter of which the output is read to its end."""

    def communicate(self, timeout):
        with self.stdout:
            text = self.stdout.read()
        self.wait(timeout)
        return text, None


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path, printed = tmp_path_factory.mktemp("bubble") / "found.json", io.StringIO()
    arguments = [
        *COUNTS,
        "--bytes",
        "1024",
        "--microbatches",
        str(COUNT),
        "--forward-ms",
        "1",
        "--backward-ms",
        "2",
        "--rounds",
        "2",
        "--json",
        str(path),
    ]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRank})
        patch.setattr(bubble, "subprocess", forking)
        try:
            assert bubble.main(arguments) == 0
        finally:
            signal.signal(signal.SIGTERM, before)
    return printed.getvalue(), json.loads(path.read_text())


def test_each_schedule_computes_and_sends_what_it_has_to(found):
    """Every stage all micro-batches both ways; a V hands over between the stages of one rank."""
    rows = found[1]["schedules"]
    assert {n: (row["num_computes"], row["num_sends"]) for n, row in rows.items()} == COUNTS
    assert all(len(row["steps"]) == 2 for row in rows.values())


def test_the_ideal_step_is_the_closed_form_of_the_measured_compute(found):
    for name, extra in (("gpipe", 3), ("interleaved", 3 / 2)):
        row = found[1]["schedules"][name]
        chunks = 2 if name == "interleaved" else 1
        both = row["inputs"]["forward_seconds"] + row["inputs"]["backward_seconds"]
        assert row["ideal_seconds"] == pytest.approx((COUNT + extra) * chunks * both)


def test_the_bubble_is_what_a_step_has_above_the_compute_alone(found):
    for name, row in found[1]["schedules"].items():
        both = row["inputs"]["forward_seconds"] + row["inputs"]["backward_seconds"]
        computed = COUNT * both * (1 if name == "gpipe" else 2)
        assert row["bubble"] == pytest.approx(1 - computed / row["step_seconds"])
        assert row["simulated_bubble"] == pytest.approx(1 - computed / row["simulated_seconds"])


def test_the_table_has_a_line_for_each_schedule(found):
    lines = found[0].splitlines()
    assert [line.split()[0] for line in lines[-len(COUNTS) :]] == list(COUNTS)
