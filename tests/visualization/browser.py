"""A headless Chromium, driven over a pipe by its own DevTools protocol, without further packages."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


# As the packages of Debian, Fedora and others call it.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--no-first-run",
)
# What becomes the browser, with the pipes where it wants them; neither may be closed by moving the other.
_WITH_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class PageError(Exception):
    """A script of the page failed, or what was asked for never came."""


class Browser:
    """One browser with one page. Use it as a context.

    Args:
        folder: Where its profile lies.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._number = 0
        self._buffer = b""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Browser":
        # The browser reads commands from its descriptor 3 and answers on its descriptor 4.
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WITH_PIPES, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        (target,) = [info for info in self._send("Target.getTargets")["targetInfos"] if info["type"] == "page"]
        attached = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        self._send("Browser.close")
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False
    ) -> None:
        """Show a file in a window of this size, and wait until its scripts have run."""
        self.errors.clear()
        self.requests.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(path.resolve().as_uri())}")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(
                answer["exceptionDetails"]["exception"].get("description", answer["exceptionDetails"]["text"])
            )
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise PageError(f"{expression} did not come true; the page reports {self.errors}.")
            time.sleep(0.05)

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the mouse to the middle of an element, and click there if asked to."""
        place = self.evaluate(
            f"""(() => {{
                const node = document.querySelector({json.dumps(selector)});
                node.scrollIntoView({{block: "center"}});
                const box = node.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        self.mouse("mouseMoved", *place)
        if click:
            self.mouse("mousePressed", *place)
            self.mouse("mouseReleased", *place)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send one event of the mouse."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def press(self, key: str) -> None:
        """Press and release a key, by its name in `KeyboardEvent.key`."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            " ": 32,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        what = {"key": key, "windowsVirtualKeyCode": codes[key], **({"text": text} if text else {})}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **what)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the page, and return its answer."""
        return self._send(method, self._session, **parameters)

    def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], 60)
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise PageError("Chromium does not answer.")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
