"""The documents as a site: ``python docs/site/build.py`` (``make docs``).

In: the repository. Out: ``build/site/html``. Documents keep their places, so their links stay as
they are; what they link to comes along. Two references are made of the code beside those that are
committed: ``plan_schema.md`` of the dataclasses of a plan, ``devices.md`` of the presets.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/adr/*.md")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


def documents() -> set[Path]:
    """The documents, and every file that one of them links to, from the root."""
    found: set[Path] = set()
    todo = [path for pattern in FIRST for path in sorted(ROOT.glob(pattern))]
    todo += sorted(ROOT.glob("benchmarks/**/README.md"))
    while todo:
        path = todo.pop()
        own = path.relative_to(ROOT)
        if own in found:
            continue
        found.add(own)
        if path.suffix == ".md":
            todo += linked(path)
    return found


def linked(path: Path) -> Iterator[Path]:
    """The files of the repository that a document links to."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    for link in _LINK.findall(prose):
        target = (path.parent / link).resolve()
        if "://" not in link and target.is_file() and ROOT in target.parents:
            yield target


def collect(folder: Path) -> None:
    """Writes the sources of the site to an empty ``folder``."""
    from references import devices_page, plan_page

    for own in documents():
        target = folder / own
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / own, target)
    (folder / "docs/plan_schema.md").write_text(plan_page())
    (folder / "docs/devices.md").write_text(devices_page())


def main() -> int:
    source = ROOT / "build/site/source"
    shutil.rmtree(source, ignore_errors=True)
    collect(source)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        str(HERE / "mkdocs.yml"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
