"""The commands and snippets of documents, and running them.

A comment before a fenced block says that it is run: ``<!-- run -->``, ``<!-- run: slow -->`` (only
in slow tests), ``<!-- run: torchrun -->`` (a snippet, by two processes, in slow tests) or
``<!-- run: write NAME -->`` (the block is a file). The blocks of a document run in their order, in
one folder that has the repository's examples and what ``document_files`` makes. What is not run is
in ``NOT_RUN``, with its reason; a test compares that list with the documents.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import run_python
from document_files import LLAMA, NET, PRELUDES, SETUP

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
)
SHOWN = ("text", "toml", "json")
"""Languages of blocks that show something, and are neither commands nor snippets."""

_COMMAND = re.compile(r"(autoparallel|python|pip|torchrun|make|sbatch|bash|kubectl)\s")
_LINKED, _COPIED = ("constraints.txt", "benchmarks"), ("examples",)
"""What a clone has. Code of models is run only where it lies in the folder itself."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``mark`` is what the comment before it says; None without one."""

    document: str
    language: str
    text: str
    mark: str | None

    @property
    def is_slow(self) -> bool:
        return self.mark in ("slow", "torchrun")

    @property
    def is_commands(self) -> bool:
        return self.language in ("", "bash", "console") and any(self.commands)

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands of a block, one each; comments at their ends are left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [re.sub(r"\s{2,}#.*$", "", line.removeprefix("$ ")).strip() for line in lines]
        return tuple(re.sub(r"\s+", " ", line) for line in found if _COMMAND.match(line))

    @property
    def parts(self) -> tuple[str, ...]:
        """What could be run: each command, or the first line of a snippet."""
        if self.is_commands:
            return self.commands
        return (self.text.splitlines()[0],) if self.language == "python" else ()


def blocks(document: str) -> Iterator[Block]:
    """The blocks of a document, in their order."""
    text = (ROOT / document).read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        mark = re.search(r"<!-- run(?:: ([^>]*?))? -->\n$", text[: match.start()])
        if match.group(1) not in SHOWN:
            yield Block(
                document,
                match.group(1),
                match.group(2),
                None if mark is None else mark.group(1) or "",
            )


def left_out() -> set[tuple[str, str]]:
    """Every command and snippet in the documents that is in no block that is run."""
    return {
        (block.document, part)
        for document in DOCUMENTS
        for block in blocks(document)
        if block.mark is None
        for part in block.parts
    }


def run_document(document: str, folder: Path, *, with_slow: bool) -> int:
    """Runs the marked blocks of a document in ``folder``; how many parts ran.

    Raises AssertionError with what a part said that failed.
    """
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    for item in SETUP.get(document, ()) if with_slow else ():
        _set_up(item, folder)
    count = 0
    for block in blocks(document):
        if block.mark is None or (block.is_slow and not with_slow):
            continue
        if block.mark.startswith("write "):
            (folder / block.mark.removeprefix("write ")).write_text(block.text)
            continue
        if block.language == "python":
            before = PRELUDES.get((document, block.parts[0]), "")
            (folder / "snippet.py").write_text(before + block.text)
            starter = "torchrun --nproc-per-node 2" if block.mark == "torchrun" else "python"
            _run(f"{starter} snippet.py", folder)
            count += 1
            continue
        for command in block.commands:
            if (document, command) not in NOT_RUN:
                _run(command, folder)
                count += 1
    return count


def _set_up(item: str, folder: Path) -> None:
    """Makes one item of ``SETUP``."""
    parts = {LLAMA: 'save_pretrained("llama")', NET: "class Net(nn.Module)"}
    if item not in parts:
        _run(item, folder)
        return
    (block,) = (each for each in blocks("docs/tutorial.md") if parts[item] in each.text)
    (folder / (NET if item == NET else "snippet.py")).write_text(block.text)
    if item == LLAMA:
        _run("python snippet.py", folder)


def _run(command: str, folder: Path) -> None:
    """One command, in a process that has done the imports where it is Python's."""
    words = shlex.split(command)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    if words[0] in ("autoparallel", "python") and not set("|&;>") & set(command):
        arguments = words[1:] if words[0] == "python" else ["-m", "autoparallel", *words[1:]]
        done = run_python(*arguments, folder=folder, environment=environment, timeout_seconds=900.0)
    else:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    assert done.returncode in EXIT_CODES.get(" ".join(words[:2]), (0,)), (
        f"{command}\n{done.stdout}\n{done.stderr}"
    )


EXIT_CODES = {"autoparallel doctor": (0, 5)}
"""By command, where a machine that is busy with tests may not be fit to train."""

INSTALLS = "installs packages; .ci/run does it in a fresh environment"
LONG = "the whole test suite or benchmark: a target of make of its own"
GPUS = "needs the GPUs that it is planned for"
CLUSTER = "needs hosts, a scheduler or a registry"

TESTED = "tests/api and tests/runtime run the same commands on small models"
NOT_RUN: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        [
            (
                "docs/failures.md",
                "autoparallel run plan.json --steps 1000 --save run1 --save-every 100 "
                "--nnodes 2 --rdzv-endpoint 10.0.0.1:29400 --max-restarts 3",
            ),
            (
                "docs/failures.md",
                "autoparallel run plan.json --steps 1000 --save run1 --save-every 50 "
                "--nnodes 3:4 --elastic --rdzv-endpoint 10.0.0.1:29400",
            ),
            (
                "docs/failures.md",
                "torchrun --nproc-per-node 8 --max-restarts 3 -m autoparallel run "
                "plan.json --steps 1000 --save run1 --save-every 100",
            ),
            (
                "docs/planning.md",
                "autoparallel run plan.json --steps 100 --count-routing routing.json",
            ),
            (
                "docs/planning.md",
                "autoparallel plan model.py --cluster 4x8xH100 --routing routing.json -o plan.json",
            ),
        ],
        TESTED,
    ),
    **dict.fromkeys(
        [
            ("CONTRIBUTING.md", "pip install -c constraints.txt -e '.[dev]'"),
            ("README.md", "pip install -c constraints.txt -e '.[dev]' && pytest -n 3"),
            (
                "README.md",
                "pip install -c constraints.txt -e . && autoparallel run examples/gpt.py "
                "--set d_model=128 --set n_layer=2 --global-batch 8 --verify --steps 50",
            ),
        ],
        INSTALLS,
    ),
    **dict.fromkeys(
        [
            ("CONTRIBUTING.md", "make check"),
            ("CONTRIBUTING.md", "python benchmarks/gpu/run.py --device cpu --small"),
            ("README.md", "autoparallel profile model.py --cluster local"),
        ],
        LONG,
    ),
    **dict.fromkeys(
        [
            ("CONTRIBUTING.md", "make gpu"),
            ("CONTRIBUTING.md", "make gpu PARTS=tests,step"),
            ("README.md", "autoparallel run plan.json --steps 100"),
            ("docs/training.md", "autoparallel run plan.json"),
            ("docs/training.md", "autoparallel verify plan.json"),
        ],
        GPUS,
    ),
    (
        "docs/launching.md",
        "autoparallel doctor --plan plan.json --hosts node1,node2",
    ): CLUSTER,
}
"""By document and command, or the first line of a snippet, why no test runs it as it stands."""
