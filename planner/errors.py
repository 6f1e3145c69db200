"""The tree of all exception classes of the package.

::

    AutoparallelError
    ├── UsageError            exit 2   a file, option or contract is wrong        AP1xx
    ├── CaptureError          exit 3   the model cannot be captured               AP2xx
    ├── InfeasibleError       exit 4   nothing fits                               AP3xx
    ├── MachineError     exit 5   this machine or installation               AP4xx
    ├── PlanError             exit 6   a stale or damaged plan                    AP5xx
    ├── VerificationError     exit 7   the parallel run differs                   AP6xx
    ├── TimeLimitError        exit 8   no plan within the time limit              AP7xx
    ├── InternalError         exit 70  a defect of this package                   AP999
    └── RunError                       a training run failed                      AP8xx
        ├── WorkerError       exit 20
        ├── HangError         exit 21
        └── DeviceMemoryError exit 22

Each error states the event, its cause, its place and a remedy.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..cost_model.cluster.given_text import printable


class AutoparallelError(Exception):
    """Base class of all errors of the package. ``code`` is stable and documented in docs/errors.md.

    ``what`` is one sentence; ``why`` the cause; ``where`` the user's ``file:line``, module path or
    option; ``fix`` a remedy to try.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, code: str, what: str, *, why: str = "", where: str = "", fix: str = ""
    ) -> None:
        super().__init__(code, what)
        self.code = code
        self.what = what
        self.why = why
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.code, self.what, self.why, self.where, self.fix)

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        for label, text in (("-->", self.where), ("why:", self.why), ("fix:", self.fix)):
            if text:
                lines.append(f"  {label} {text}")
        lines += [f"  {note}" for note in getattr(self, "__notes__", ())]
        return printable("\n".join(lines))


def _rebuild(kind: type[AutoparallelError], code: str, what: str, *rest: str) -> AutoparallelError:
    why, where, fix = rest
    return kind(code, what, why=why, where=where, fix=fix)


class UsageError(AutoparallelError):
    """A file, an option or a model file's functions are wrong. Exit code 2."""

    exit_code = 2


class CaptureError(AutoparallelError):
    """The model cannot be captured."""

    exit_code = 3


class InfeasibleError(AutoparallelError):
    """No plan fits the cluster."""

    exit_code = 4


class MachineError(AutoparallelError):
    """This machine or installation cannot do the task."""

    exit_code = 5


class PlanError(AutoparallelError):
    """A plan file is damaged, or does not match the model, cluster or version."""

    exit_code = 6


class VerificationError(AutoparallelError):
    """The parallel run differs from one device."""

    exit_code = 7


class TimeLimitError(AutoparallelError):
    """The time limit passed before any plan was found."""

    exit_code = 8


class InternalError(AutoparallelError):
    """Two computations of one figure disagree: a defect of this package."""

    exit_code = 70


class RunError(AutoparallelError):
    """A training run failed."""

    exit_code = 20


class WorkerError(RunError):
    """A worker process failed; the others were ended."""


class HangError(RunError):
    """A worker stopped making progress."""

    exit_code = 21


class DeviceMemoryError(RunError):
    """A worker ran out of memory."""

    exit_code = 22
