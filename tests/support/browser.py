"""Pages in a real browser, without more than the browser itself.

A page stands in two frames, 1280 and 390 pixels wide, of a document whose script presses keys and
buttons in them and notes what it finds. Chromium prints that document as it is in the end.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (1280, 390)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"
)

DARK, LIGHT = 0, 1

PROBE = """
const found = [];
addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("iframe").forEach((frame) => {
    const doc = frame.contentDocument, win = frame.contentWindow, own = { errors: win.faults };
    const press = (id, key) => doc.getElementById(id).dispatchEvent(
      new win.KeyboardEvent("keydown", { key, bubbles: true }));
    own.overflow = doc.documentElement.scrollWidth - win.innerWidth;
    own.sections = [...doc.querySelectorAll("section")].map((each) =>
      [each.id, each.getBoundingClientRect().height, each.getBoundingClientRect().right]);
    own.background = win.getComputedStyle(doc.body).backgroundColor;
    WHAT
    found.push(own);
  });
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
}, 200));
"""

CATCH = (
    "<script>window.faults = []; addEventListener('error', (e) => faults.push(e.message));"
    "const say = console.error; console.error = (...all) => { faults.push(all.join(' '));"
    " say(...all); };</script>"
)
"""Before all of a frame's own scripts."""


def probed(page: str, what: str, folder: Path, scheme: int = LIGHT) -> list[dict[str, Any]]:
    """What was found in each frame: errors, overflow, sections, background, and what the script
    ``what`` puts into ``own``. It has ``doc``, ``win`` and ``press(id, key)``."""
    caught = html.escape(page.replace("<head>", f"<head>{CATCH}", 1))
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{caught}"></iframe>' for width in WIDTHS
    )
    path = folder / "probe.html"
    script = PROBE.replace("WHAT", what)
    path.write_text(f"<!doctype html><body>{frames}<script>{script}</script></body>")
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    found: list[dict[str, Any]] = json.loads(html.unescape(match.group(1)))
    return found


def check_frames(frames: list[dict[str, Any]], sections: tuple[str, ...]) -> None:
    """No errors; every section is there, has a height, and is no wider than its frame."""
    assert len(frames) == len(WIDTHS)
    for found, width in zip(frames, WIDTHS, strict=True):
        assert found["errors"] == []
        assert found["overflow"] <= 0
        assert tuple(name for name, _, _ in found["sections"]) == sections
        assert all(height > 30 and right <= width for _, height, right in found["sections"])
