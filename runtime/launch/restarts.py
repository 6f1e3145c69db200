"""Which failures a restart can mend.

In: the error that ended an attempt. Out: whether all ranks are to be started again. A rank that
died, hangs or lost another one may do better the next time. A wrong option, plan or model, too
little memory or a loss that is not finite would only come again.
"""

from __future__ import annotations

import sys

from ...planner.errors import AutoparallelError

MENDABLE = ("AP801", "AP802", "AP820", "AP821", "AP826")
"""The codes of a rank that failed or died, one that hangs, those that lost another one, and hosts
that lost one."""


def can_mend(error: AutoparallelError) -> bool:
    """Whether the same run may go on after ``error``.

    >>> from ...planner.errors import DeviceMemoryError, WorkerError
    >>> can_mend(WorkerError("AP801", "rank 1 of 2 died"))
    True
    >>> can_mend(DeviceMemoryError("AP803", "rank 1 of 2 ran out of memory"))
    False
    """
    return error.code in MENDABLE


def tell_restart(error: AutoparallelError, number: int, most: int) -> None:
    """Says on stderr why the ranks are started again, for the ``number``-th time."""
    sys.stderr.write(f"{error}\nautoparallel: restart {number} of {most}\n")
    sys.stderr.flush()
