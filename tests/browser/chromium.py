"""A headless Chromium, driven through its debugging pipe: no driver and no package is needed.

Messages are JSON with a NUL at the end; Chromium reads from file descriptor 3 and answers on 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
)
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """The program, or ``None`` where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Page:
    """One tab. ``console`` and ``requests`` collect what happened since it was opened."""

    _send: int
    _receive: int
    _session: str = ""
    _next: int = 0
    _buffer: bytes = b""
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, file: Path, *, width: int, height: int = 800, is_dark: bool = False) -> None:
        """Show a local file in a window of that many CSS pixels, at 2 device pixels each."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.console.clear()
        self.requests.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + _TIMEOUT_S
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, f"{file} did not load"
            time.sleep(0.02)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=width < 600,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (JSON types); that of a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, *, full: bool = False) -> bytes:
        """PNG of the window, or of the whole page."""
        options: dict[str, Any] = {"format": "png"}
        if full:
            options["captureBeyondViewport"] = True
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "scale": 1} | {
                name: size[name] for name in ("width", "height")
            }
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come in between are collected."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def attach(self) -> None:
        """Open a tab of our own and listen to its console and requests."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.console.append(json.dumps(parameters))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], _TIMEOUT_S)
            assert ready, "Chromium does not answer"
            part = os.read(self._receive, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def open_browser(program: str) -> Iterator[Page]:
    """A browser with an empty profile of its own and one tab."""
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        # the shell moves our ends to the numbers that Chromium expects
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = [*_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", command, program, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(send, receive)
            page.attach()
            yield page
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(send)
            os.close(receive)
