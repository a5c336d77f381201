"""Spark home for local sessions whose Python workers start faster.

Each Python worker of Spark imports pyspark from a zip of sources and compiles it: one second of CPU
time for every query that starts. The same modules are installed beside the zip, compiled. This home
is a folder of links to the installation, without the zip. If it cannot be created, Spark starts as
usual.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.spark")

_ZIP_FOLDER = Path("python") / "lib"


def use_precompiled_home(cache: Path) -> None:
    """Set SPARK_HOME to a precompiled home below `cache`, unless SPARK_HOME is set."""
    if "SPARK_HOME" in os.environ or (found := find_spec("pyspark")) is None or not found.origin:
        return
    installed = Path(found.origin).resolve().parent
    if not (installed / "jars").is_dir():  # A pyspark client without Spark.
        return
    name = hashlib.sha256(os.fsencode(installed)).hexdigest()[:16]
    home = cache / f"spark-{name}"
    try:
        if not home.exists():
            _create_home(installed, home)
    except OSError as error:
        log.debug(
            "spark_home.unavailable",
            "cannot create a precompiled Spark home; Spark starts from {path}: {error}",
            path=installed,
            error=error,
        )
        return
    os.environ["SPARK_HOME"] = str(home)


def _create_home(installed: Path, home: Path) -> None:
    """Create the home under a temporary name and rename it: another process may do the same."""
    home.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=home.parent))
    try:
        link_installation(installed, made)
        made.rename(home)
    except OSError:
        shutil.rmtree(made)
        if not home.exists():
            raise


def link_installation(installed: Path, made: Path) -> None:
    """Fill a folder with links to the installation, except the zips of modules."""
    for path in installed.iterdir():
        if path.name != _ZIP_FOLDER.parts[0]:
            (made / path.name).symlink_to(path)
    for path in (installed / _ZIP_FOLDER.parts[0]).glob("*"):
        if path.name != _ZIP_FOLDER.parts[1]:
            (made / _ZIP_FOLDER.parts[0]).mkdir(exist_ok=True)
            (made / _ZIP_FOLDER.parts[0] / path.name).symlink_to(path)
