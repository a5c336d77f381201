"""Folder for data that later test runs reuse."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return a folder that survives test runs and belongs to this user only.

    Raises:
        PermissionError: Another user owns a folder of that name.
    """
    found = Path(tempfile.gettempdir()) / f"simplebus-tests-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    if found.stat().st_uid != os.getuid():
        raise PermissionError(f"{found} belongs to another user; expected a folder of this user")
    return found
