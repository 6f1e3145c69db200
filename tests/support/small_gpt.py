"""The example's GPT, trained on a few files of the standard library.

In: a folder. Out: a model file in it. The example reads all sources of the standard library, which
takes each rank longer than the steps of a test.
"""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
ALL, FEW = 'root.rglob("*.py")', 'root.glob("a*.py")'


def save_gpt(folder: Path) -> Path:
    """``brief_gpt.py`` in ``folder``."""
    text = EXAMPLE.read_text()
    assert ALL in text
    path = folder / "brief_gpt.py"  # another one than the example, which may be loaded
    path.write_text(text.replace(ALL, FEW))
    return path
