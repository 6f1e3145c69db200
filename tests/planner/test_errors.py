"""The error tree: codes, texts and what crosses a process boundary."""

from __future__ import annotations

import pickle

from autoparallel.planner import errors


def _tree(root: type[errors.AutoparallelError]) -> list[type[errors.AutoparallelError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


def test_exit_codes_are_the_documented_ones() -> None:
    codes = {kind.__name__: kind.exit_code for kind in _tree(errors.AutoparallelError)}
    assert codes == {
        "AutoparallelError": 1,
        "UsageError": 2,
        "CaptureError": 3,
        "InfeasibleError": 4,
        "InternalError": 70,
        "MachineError": 5,
        "PlanError": 6,
        "VerificationError": 7,
        "TimeLimitError": 8,
        "RunError": 20,
        "WorkerError": 20,
        "HangError": 21,
        "DeviceMemoryError": 22,
    }


def test_an_error_says_what_why_where_and_what_to_try() -> None:
    error = errors.UsageError("AP101", "no file", why="typo", where="model.py:3", fix="look")
    assert str(error).splitlines() == [
        "error[AP101]: no file",
        "  --> model.py:3",
        "  why: typo",
        "  fix: look",
    ]


def test_an_error_survives_pickling() -> None:
    error = errors.InfeasibleError("AP301", "too big", fix="more devices")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.InfeasibleError
    assert str(copy) == str(error)
