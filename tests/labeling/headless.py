"""A headless Chromium that a test drives with keys, by the Chrome DevTools Protocol over a pipe."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60
"""Until a browser that says nothing is given up: far more than anything takes."""
KEYS = {"left": ("ArrowLeft", 37), "right": ("ArrowRight", 39), "tie": ("ArrowDown", 40), "undo": ("Backspace", 8)}


class Page:
    """A window of its own, with a profile that others do not see."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self("Page.enable")
        self("Network.enable")
        self("Runtime.enable")
        self("Log.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, parameters, self.session)

    def open(self, address: str) -> None:
        self.load("Page.navigate", url=address)

    def load(self, method: str, **parameters: Any) -> None:
        """Call what loads a document, and wait until it is there."""
        before = self.browser.count("Page.loadEventFired", self.session)
        self(method, **parameters)
        self.browser.wait_for(lambda: self.browser.count("Page.loadEventFired", self.session) > before)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until a JavaScript condition holds. It is asked for from here: a promise of the page would end with its document."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"waited {SECONDS} s for {condition}"
            time.sleep(0.02)

    def press(self, answer: str, modifiers: int = 0) -> None:
        """A key, as a rater presses it."""
        key, code = KEYS[answer]
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers)

    def enter(self) -> None:
        self("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")

    def type(self, text: str) -> None:
        self("Input.insertText", text=text)


class Browser:
    """The process and its pipe: descriptor 3 takes messages, 4 gives them, each ends with a NUL."""

    def __init__(self, profile: Path) -> None:
        there, commands = os.pipe()
        answers, here = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        command = [str(CHROMIUM), *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # A shell gives the pipe the descriptors that Chromium looks for.
        shell = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{here}', "chromium", *command]
        self.process = subprocess.Popen(shell, pass_fds=(there, here), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(there)
        os.close(here)
        self.commands, self.answers = os.fdopen(commands, "wb", buffering=0), os.fdopen(answers, "rb")
        self.events: list[dict[str, Any]] = []
        self.news = threading.Condition()
        self.replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self.number = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        buffer = b""
        while part := os.read(self.answers.fileno(), 65536):
            *messages, buffer = (buffer + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self.replies.put(message)
                else:
                    with self.news:
                        self.events.append(message)
                        self.news.notify_all()

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self.commands.write(json.dumps(message).encode() + b"\0")
        reply = self.replies.get(timeout=SECONDS)
        assert reply["id"] == self.number
        assert "error" not in reply, reply["error"]
        result: dict[str, Any] = reply["result"]
        return result

    def page(self) -> Page:
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        return Page(self, self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"])

    def count(self, method: str, session: str) -> int:
        return sum((event["method"], event.get("sessionId")) == (method, session) for event in self.events)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until events make a condition true."""
        with self.news:
            assert self.news.wait_for(condition, SECONDS)

    def seen(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events with this name."""
        return [event["params"] for event in self.events if event["method"] == method]


@contextmanager
def headless(profile: Path) -> Iterator[Browser]:
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.process.terminate()
        browser.process.wait(SECONDS)
        browser.commands.close()
        browser.answers.close()
