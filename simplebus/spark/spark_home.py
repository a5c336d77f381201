"""A home of Spark's for sessions on this machine, whose Python processes start sooner.

Spark has each of its Python processes import pyspark from a zip of sources, where it is compiled
anew: a second of processor time for every query that starts. The same modules are installed beside
the zip, compiled. A home without the zip has Python find those.

Rule 1: nothing of Spark's is copied or changed: the home is a folder of links to what is installed.
Rule 2: it is a gain of time and no more: where it cannot be had, Spark starts as it always does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger("simplebus.spark")

_ZIPS = Path("python") / "lib"


def quick_home(cache: Path) -> None:
    """Have sessions of this process use such a home, unless SPARK_HOME says which is to be used."""
    if "SPARK_HOME" in os.environ or (found := find_spec("pyspark")) is None or not found.origin:
        return
    installed = Path(found.origin).resolve().parent
    if not (installed / "jars").is_dir():  # Spark itself is elsewhere.
        return
    name = hashlib.sha256(os.fsencode(installed)).hexdigest()[:16]
    home = cache / f"spark-{name}"
    try:
        if not home.exists():
            _make(installed, home)
    except OSError as error:
        log.debug("Spark starts from %s: %s", installed, error)
        return
    os.environ["SPARK_HOME"] = str(home)


def _make(installed: Path, home: Path) -> None:
    """Who makes the same one meanwhile makes the same."""
    home.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=home.parent))
    try:
        link(installed, made)
        made.rename(home)
    except OSError:
        shutil.rmtree(made)
        if not home.exists():
            raise


def link(installed: Path, made: Path) -> None:
    """Fill a folder with links to what is installed, all but the zips of modules."""
    for path in installed.iterdir():
        if path.name != _ZIPS.parts[0]:
            (made / path.name).symlink_to(path)
    for path in (installed / _ZIPS.parts[0]).glob("*"):
        if path.name != _ZIPS.parts[1]:
            (made / _ZIPS.parts[0]).mkdir(exist_ok=True)
            (made / _ZIPS.parts[0] / path.name).symlink_to(path)
