"""A real browser: headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.tiering.patience import PATIENCE_S

__all__ = ["Page", "chromium", "open_pages"]


def chromium() -> str | None:
    """The browser's command; None: there is none."""
    return shutil.which("chromium")


class Page:
    """One page, in a browser of its own. `requests`, `complaints`: what it has asked for, and what
    it has written to its console, since it was opened."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str, motion: str = "no-preference") -> None:
        """`scheme`: `light` or `dark`."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in features.items()],
        )

    def open(self, url: str) -> None:
        """Open a page and wait until it has drawn its first answer."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState == 'complete' && document.body.dataset.shown >= 1")

    def js(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.js(condition):
            assert time.monotonic() < deadline, f"not so: {condition}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        text: str = self.js(f"document.querySelector({json.dumps(selector)}).textContent")
        return text

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def open_pages(folder: Path) -> Iterator[Page]:
    """A browser whose files are in `folder`, and which is ended with the context."""
    command = chromium()
    assert command is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()

    process = subprocess.Popen(
        [
            *("bash", "-c", f'exec "$@" 3<&{commands_out} 4>&{answers_in}', "bash", command),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-component-update"),
            *("--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}/profile"),
        ],
        env=os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(commands_out, answers_in),
    )
    os.close(commands_out)
    os.close(answers_in)
    try:
        yield Page(commands_in, answers_out)
    finally:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            os.write(commands_in, b'{"id": 0, "method": "Browser.close"}\0')
            process.wait(PATIENCE_S)
        process.kill()
        os.close(commands_in)
        process.wait()
        os.close(answers_out)
