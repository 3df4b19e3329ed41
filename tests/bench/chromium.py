"""Debian's Chromium without a window, driven through its debugging pipe: no library needed.

Commands and events are JSON, each ended by a zero byte, on file descriptors 3 and 4 of Chromium:
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOUND = shutil.which("chromium")
WHY_NOT = "chromium is not installed (apt-get install chromium)"
SECONDS = 60  # for any answer
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
# Chromium wants descriptors 3 and 4, which may be in use here but not in a new process.
START = (
    "import fcntl, os, sys; "
    "r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Chromium:
    """One browser with one tab. ``logged`` and ``requested`` fill up as the page goes."""

    def __init__(self) -> None:
        assert FOUND is not None, WHY_NOT
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self.commands = os.pipe()
        self.answers, write = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", START, str(read), str(write), FOUND, *FLAGS,
                f"--user-data-dir={self.profile.name}", "about:blank",
            ],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self.buffer = b""
        self.last = 0
        self.session: str | None = None
        self.logged: list[str] = []
        self.requested: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc: object) -> None:
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()

    def open(
        self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False,
        scripts: bool = True,
    ) -> None:  # fmt: skip
        """Load the page, and forget what earlier ones logged and asked for."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
            deviceScaleFactor=2 if width < 600 else 1,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.logged, self.requested, self.loaded = [], [], False
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + SECONDS
        while not self.loaded:
            self._take(self._read(deadline))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; tests may ask even of a page whose
        own scripts are off."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click, in the middle of the element."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView();"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, as from a keyboard."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.last += 1
        command: dict[str, Any] = {"id": self.last, "method": method, "params": parameters}
        if self.session is not None:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            message = self._read(deadline)
            if message.get("id") == self.last:
                assert "error" not in message, message
                return message["result"]
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        method, content = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.requested.append(content["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.logged.append(json.dumps(content))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer within {SECONDS} s")
            received = os.read(self.answers, 1 << 20)
            if not received:
                raise EOFError("Chromium has ended")
            self.buffer += received
        text, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
