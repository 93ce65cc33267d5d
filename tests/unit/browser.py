"""A headless Chromium that tests can ask what it shows, over the pipe of its DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PATIENCE_S = 120.0


class Browser:
    """One page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, page: Path) -> None:
        """Show a page, as soon as its scripts have run."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=page.as_uri())
        while not self.ask("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass

    def ask(self, script: str) -> Any:
        """The value of an expression on the page, of its promise if it is one. What the page raises is raised."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def emulate(self, *, width: int, height: int = 900, dark: bool = False, paper: bool = False) -> None:
        """Be a screen of this size, or paper."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print" if paper else "screen", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.ask("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")  # drawn anew

    def picture(self, path: Path) -> None:
        """What the whole page looks like, for people."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
                assert ready, f"chromium does not answer {method}"
                data = os.read(self._from, 1 << 20)
                assert data, f"chromium has died at {method}"
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:  # all else are events
                assert "error" not in answer, answer["error"]
                return answer["result"]


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser without a network. Skips where none is installed; with CI=true it fails."""
    path = shutil.which("chromium")
    if path is None:
        assert "CI" not in os.environ, "chromium is not installed"
        pytest.skip("chromium is not installed; on Debian: apt install chromium")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    argv = [path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    argv += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    # It reads what it is told from 3 and answers on 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *argv]
    process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)  # which ends it
        try:
            process.wait(timeout=_PATIENCE_S)
        finally:
            process.kill()
            os.close(ours_in)
