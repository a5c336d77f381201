"""Real Chromium, controlled through the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.requirements import require_program

PATIENCE_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


class Browser:
    """One window of a headless Chromium, controlled through a WebDriver server."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._session = ""
        options = {"args": list(_FLAGS)}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        created = self._send_request(
            "POST", "/session", {"capabilities": {"alwaysMatch": capabilities}}
        )
        self._session = f"/session/{created['sessionId']}"

    def close(self) -> None:
        self._send_request("DELETE", "")

    def open(self, url: str) -> None:
        self._send_request("POST", "/url", {"url": url})

    def run_script(self, script: str, *arguments: object) -> Any:
        """Run JavaScript and return its result."""
        return self._send_request(
            "POST", "/execute/sync", {"script": script, "args": list(arguments)}
        )

    def wait_until(self, script: str, *arguments: object) -> Any:
        """Run JavaScript until its result is true, and return the result."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (result := self.run_script(script, *arguments)):
            assert time.monotonic() < deadline, (
                f"{script} is {result!r} after {PATIENCE_SECONDS:g} s"
            )
            time.sleep(0.05)
        return result

    def press_keys(self, *keys: str) -> None:
        """Press keys one after the other; the focused element receives them."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send_request(
            "POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]}
        )

    def set_viewport(self, *, width: int, height: int, dark: bool = False) -> None:
        """Set the size and the color scheme of the page."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def save_screenshot(self, file: Path, *, full_page: bool = True) -> None:
        """Save a PNG of the page."""
        screenshot = self.command(
            "Page.captureScreenshot", format="png", captureBeyondViewport=full_page
        )
        file.write_bytes(base64.b64decode(screenshot["data"]))

    def read_log(self) -> list[str]:
        """Return the browser's log entries since the last call."""
        entries = self._send_request("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def command(self, name: str, **parameters: object) -> Any:
        """Send a command of the Chrome DevTools protocol."""
        return self._send_request("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _send_request(self, method: str, path: str, content: object = None) -> Any:
        data = None if method == "DELETE" else json.dumps(content or {}).encode()
        request = urllib.request.Request(
            f"{self._driver}{self._session}{path}",
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.request.HTTPError as error:  # type: ignore[attr-defined]
            with error:
                raise AssertionError(f"{path}: {error.read().decode()[:500]}") from None


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser and close it at the end of the block."""
    driver = require_program("chromedriver")
    require_program("chromium", "chromium-browser", "google-chrome")
    with (
        # Chromium may still write while the directory is removed.
        tempfile.TemporaryDirectory(
            prefix="simplebus-browser-", ignore_cleanup_errors=True
        ) as home_folder,
        ExitStack() as stack,
    ):
        for _ in range(5):
            process = stack.enter_context(
                subprocess.Popen(
                    [driver, "--port=0"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "HOME": home_folder, "TMPDIR": home_folder},
                )
            )
            stack.callback(process.terminate)
            if port := _read_driver_port(process):
                break
        else:
            raise AssertionError("chromedriver exited before it was ready")
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.close()


def _read_driver_port(process: subprocess.Popen[str]) -> str:
    """Return the port of the WebDriver server, or "" if it has ended.

    The driver ends if the port that it chose for IPv4 is in use for IPv6.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if port := re.search(r"started successfully on port (\d+)", line):
            return port[1]
    return ""
