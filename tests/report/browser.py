"""Pages in a real browser, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (apt-get install chromium)")


def shown(page: Path, folder: Path, width: int) -> str:
    """Return the DOM of a page in a window of this width, which opens without an error and asks for nothing."""
    log = folder / "net.json"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--enable-logging=stderr"]
    flags += [f"--log-net-log={log}", "--disable-background-networking", f"--user-data-dir={folder / 'user'}"]
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    asked = re.findall(r'"url":"([^"]+)"', log.read_text())
    assert [url for url in asked if not re.match(r"file:|data:|https?://[^/]*(google|gvt1)", url)] == []
    return done.stdout
