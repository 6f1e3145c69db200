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


class AutoparallelError(Exception):
    """Root of the tree. ``code`` is stable and documented in docs/errors.md.

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
        return "\n".join(lines)


def _rebuild(kind: type[AutoparallelError], code: str, what: str, *rest: str) -> AutoparallelError:
    why, where, fix = rest
    return kind(code, what, why=why, where=where, fix=fix)


class UsageError(AutoparallelError):
    """Error of a file, an option or the contract of a model file."""

    exit_code = 2


class CaptureError(AutoparallelError):
    """Error of a model that cannot be captured."""

    exit_code = 3


class InfeasibleError(AutoparallelError):
    """Error of a search: no plan fits the cluster."""

    exit_code = 4


class MachineError(AutoparallelError):
    """Error of this machine or installation, which cannot do the task."""

    exit_code = 5


class PlanError(AutoparallelError):
    """Error of a plan file: damaged, or for another model, cluster or version."""

    exit_code = 6


class VerificationError(AutoparallelError):
    """Error of a verification: the parallel run differs from one device."""

    exit_code = 7


class TimeLimitError(AutoparallelError):
    """Error of a search whose time limit passed before it found any plan."""

    exit_code = 8


class InternalError(AutoparallelError):
    """Error of this package itself: two computations of one figure disagree."""

    exit_code = 70


class RunError(AutoparallelError):
    """Error of a training run."""

    exit_code = 20


class WorkerError(RunError):
    """Error of a worker process that failed; the other workers were ended."""


class HangError(RunError):
    """Error of a worker that stopped making progress."""

    exit_code = 21


class DeviceMemoryError(RunError):
    """Error of a worker that ran out of memory."""

    exit_code = 22
