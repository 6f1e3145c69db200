"""Answers requests for plans and prices, each in a forked process of its own.

In: lines of JSON on stdin, see ``jobs.answer``. Out: a line of JSON for each. torch and
transformers are imported once, before the forks. ``run.py`` starts this file; with ``--against`` it
starts that of the other checkout too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    os.chdir(ROOT)  # targets are relative to it, and stay so in the plans
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no answer
    sources = capture_sources()

    import transformers  # noqa: F401 - once, for all children

    from benchmarks.corpus.jobs import answer

    for line in sys.stdin:
        request = json.loads(line)
        found = in_child(lambda request=request: answer(request, sources))
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    return 0


def capture_sources() -> list[Path]:
    """The files of this package that are loaded to capture a model: captures depend on no others.

    To be called before other modules of the package are imported.
    """
    import autoparallel.passes.capture.capture_model

    assert autoparallel.passes.capture.capture_model.capture
    loaded = [(name, getattr(module, "__file__", None)) for name, module in sys.modules.items()]
    return sorted(Path(file) for name, file in loaded if file and name.startswith("autoparallel."))


def in_child(answer: Any) -> dict[str, Any]:
    """What ``answer`` returns in a fork of this process, or the signal that ended it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(answer(), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        return {"failure": f"the process ended with {os.waitstatus_to_exitcode(status)}"}
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    sys.exit(main())
