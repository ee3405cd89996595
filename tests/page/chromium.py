"""A headless Chromium, spoken to over pipes with the DevTools protocol: no library and no port is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

WAIT_SECONDS = 60.0
"""The longest wait for a state of a page."""

_LEFT = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")
"""What Chromium says where the page of a script is left while the script runs."""

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1"),
)


class PageLeft(AssertionError):
    """The page that a script ran in is not shown any more."""


class Tab:
    """One page. ``problems`` has console errors and exceptions, ``requests`` the addresses that were asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def view(self, width: int, height: int, scheme: str = "light") -> None:
        """The size of the window, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))

    def wait(self, condition: str) -> Any:
        """The value of ``condition`` once it is true, on this page or the one that comes after it. Fails with the
        page's text when it does not come.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not (value := self._value(condition)):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {condition}\n{self.problems}\n{self.text()}")
            time.sleep(0.05)
        return value

    def _value(self, condition: str) -> Any:
        try:
            return self.run(condition)
        except PageLeft:
            return None

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait(f"(document.querySelector({json.dumps(selector)})?.innerText || '').includes({json.dumps(text)})")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def take(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"].get("exception", parameters)))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(str(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])


class Browser:
    """Owns the process. Used by one thread."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (read_in, self._write), (self._read, write_out) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (read_in, write_out)]
        os.close(read_in)
        os.close(write_out)
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        redirect = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        command = ["bash", "-c", redirect, "chromium", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for descriptor in theirs:
            os.close(descriptor)
        self._buffer = bytearray()
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def tab(self) -> Tab:
        """A new, empty page, with its own cookies."""
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = Tab(self, session)
        self._tabs[session] = tab
        return tab

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        number, deadline = self._number, time.monotonic() + WAIT_SECONDS
        while number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(number)
        if error := answer.get("error"):
            kind = PageLeft if error["message"].startswith(_LEFT) else AssertionError
            raise kind(f"{method}: {error}")
        return answer["result"]

    def _receive(self, deadline: float) -> None:
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(self._read, 1 << 20) if ready else b""
        if not data:
            raise AssertionError("Chromium does not answer")
        self._buffer += data
        while (end := self._buffer.find(b"\0")) >= 0:
            message = json.loads(self._buffer[:end])
            del self._buffer[: end + 1]
            if "id" in message:
                self._answers[message["id"]] = message
            elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                tab.take(message["method"], message["params"])

    def close(self) -> None:
        os.close(self._write)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    browser = Browser(folder / "profile")
    try:
        yield browser
    finally:
        browser.close()
