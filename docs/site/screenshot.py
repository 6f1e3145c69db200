"""The picture of a report: ``python docs/site/screenshot.py`` (``make picture``).

In: the plan of the README's section "A plan", made here. Out: ``docs/images/report.png``, two
sections of its page in the light theme, 1,600 pixels wide. Takes Chromium; Pillow makes the file
smaller.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/images/report.png"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLAN = (
    "hf:examples/llama3_8b",
    "--cluster",
    "8xH100",
    "--global-batch",
    "64",
    "--seq",
    "4096",
    "--precision",
    "bf16",
)
WIDTH, HEIGHT = 1067, 1180
"""In CSS pixels, of which each is 1.5 pixels."""

NUM_COLOURS = 128

SHOWN = ("schedule", "memory")
"""The sections in the picture."""


def main() -> int:
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        print(f"none of {', '.join(NAMES)} is installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        plan, page = Path(folder) / "plan.json", Path(folder) / "report.html"
        _autoparallel("plan", *PLAN, "-o", str(plan))
        _autoparallel("inspect", str(plan), "--html", str(page))
        others = "".join(f":not(#{name})" for name in SHOWN)
        style = f"<style>section{others}, nav {{ display: none }}</style></head>"
        page.write_text(page.read_text().replace("</head>", style, 1))
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            "--virtual-time-budget=3000",
            "--blink-settings=preferredColorScheme=1",
            "--force-device-scale-factor=1.5",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={PICTURE}",
            page.as_uri(),
        ]
        PICTURE.parent.mkdir(exist_ok=True)
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    _shrink(PICTURE)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1000:.0f} kB")
    return 0


def _autoparallel(*arguments: str) -> None:
    command = [sys.executable, "-m", "autoparallel", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _shrink(path: Path) -> None:
    """Fewer colours, where Pillow is installed."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as image:
        image.convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
