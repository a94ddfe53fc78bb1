"""Open a page in headless Chromium and say what the browser has to say about it.

Uses the DevTools protocol over a websocket. A test that needs a browser is skipped where none is installed.
"""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
PATIENCE_S = 60.0


@dataclass
class Visit:
    """What happened while a page loaded: complaints, every address asked for, and values of expressions."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


def visit(
    page: Path, *expressions: str, width: int = 1280, dark: bool = False, screenshot: Path | None = None
) -> Visit:
    """Load a local page, offline, and evaluate JavaScript expressions on it.

    `width` is that of the window in CSS pixels; with `screenshot`, the page from top to bottom is written there as PNG.
    """
    with _devtools() as call:
        seen = Visit()
        for domain in ("Page", "Runtime", "Log", "Network"):
            call(f"{domain}.enable")
        call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
        call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        call("Emulation.setEmulatedMedia", features=[scheme])
        call("Page.navigate", url=page.resolve().as_uri())
        call.wait_for("Page.loadEventFired")
        for expression in expressions:
            answer = call("Runtime.evaluate", expression=expression, returnByValue=True)
            seen.values.append(answer["result"].get("value"))
        if screenshot is not None:
            _write_screenshot(call, screenshot)
        for event in call.events:
            _note(event, seen)
        return seen


class _Session:
    """Calls over one websocket; events that arrive in between are kept."""

    def __init__(self, address: str) -> None:
        self.socket = websocket.create_connection(address, timeout=PATIENCE_S, suppress_origin=True)
        self.events: list[dict[str, Any]] = []
        self.calls = 0

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.calls += 1
        self.socket.send(json.dumps({"id": self.calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.calls:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    def wait_for(self, event: str) -> None:
        while not any(seen.get("method") == event for seen in self.events):
            self.events.append(json.loads(self.socket.recv()))


@contextmanager
def _devtools() -> Iterator[_Session]:
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(NAMES)})")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            session = _Session(_page_address(Path(profile), process))
            yield session
            session("Browser.close")
        finally:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _page_address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Websocket address of the browser's first tab, once the browser listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        port_file = profile / "DevToolsActivePort"
        if port_file.exists() and (lines := port_file.read_text().split()):
            with opener.open(f"http://127.0.0.1:{lines[0]}/json/list", timeout=PATIENCE_S) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.1)
    raise RuntimeError(f"Chromium did not open its DevTools port within {PATIENCE_S:.0f} s")


def _write_screenshot(call: _Session, path: Path) -> None:
    size = call("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    picture = call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(picture["data"]))


def _note(event: dict[str, Any], seen: Visit) -> None:
    method, facts = event.get("method"), event.get("params", {})
    if method == "Network.requestWillBeSent":
        seen.requests.append(facts["request"]["url"])
    elif method == "Network.loadingFailed":
        seen.failed.append(facts["errorText"])
    elif method == "Runtime.exceptionThrown":
        seen.errors.append(facts["exceptionDetails"]["text"])
    elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
        seen.errors.append(facts["entry"]["text"])
    elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
        seen.errors.append(" ".join(str(argument.get("value")) for argument in facts["args"]))
