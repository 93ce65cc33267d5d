"""A picture of a report: python docs/screenshot.py report.html docs/report.png [WIDTH HEIGHT]; needs chromium."""

import subprocess
import sys
import tempfile
from pathlib import Path

page, picture = (Path(argument).absolute() for argument in sys.argv[1:3])
width, height = sys.argv[3:5] or ("1100", "3500")
with tempfile.TemporaryDirectory() as profile:
    argv = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ]
    argv += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=8000", f"--window-size={width},{height}"]
    subprocess.run([*argv, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=200)
