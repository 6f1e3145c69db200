"""A rank that torchrun starts: ``rank_of_torchrun.py ENTRY ARGUMENTS TIMEOUT``.

It ends with the code of its error, as the command line does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from autoparallel.planner.errors import AutoparallelError
from autoparallel.runtime.launch.launch import launch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "runtime")]
    entry, arguments, timeout = sys.argv[1:]
    try:
        launch(
            entry,
            json.loads(arguments),
            num_processes=int(os.environ["WORLD_SIZE"]),
            timeout_seconds=float(timeout),
        )
    except AutoparallelError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
