"""Folder for data that later test runs reuse."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """A folder that outlives a run of the tests, and is this user's alone.

    Raises PermissionError where somebody else has one of its name.
    """
    found = Path(tempfile.gettempdir()) / f"simplebus-tests-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    if found.stat().st_uid != os.getuid():
        raise PermissionError(f"{found} is somebody else's")
    return found
