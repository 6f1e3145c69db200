"""The example's GPT, trained on a few files of the standard library.

In: a folder. Out: a model file in it. The example reads all sources of the standard library, which
takes each rank longer than the steps of a test.
"""

from __future__ import annotations

import os
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
ALL, FEW = 'root.rglob("*.py")', 'root.glob("a*.py")'


def save_gpt(folder: Path) -> Path:
    """``brief_gpt.py`` in ``folder``."""
    text = EXAMPLE.read_text()
    assert ALL in text
    path = folder / "brief_gpt.py"  # another one than the example, which may be loaded
    partial = path.with_suffix(f".{os.getpid()}")  # ranks that share a folder save it at once
    partial.write_text(text.replace(ALL, FEW))
    partial.rename(path)
    return path
