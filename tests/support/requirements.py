"""Programs other than Python that some tests need."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def require_program(*names: str) -> str:
    """Return the first of these programs that is installed.

    Without any, the test is skipped; in CI, which installs them, it fails.
    """
    for name in names:
        if shutil.which(name):
            return name
    return skip_or_fail(f"this test needs one of {', '.join(names)}")


def nats_server_program() -> str:
    """Return the path of nats-server: in the folder of this Python, or else on the search path."""
    sibling = Path(sys.executable).with_name("nats-server")
    return str(sibling) if sibling.exists() else shutil.which("nats-server") or "nats-server"


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the current test; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
