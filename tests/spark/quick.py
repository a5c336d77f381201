"""What lets a JVM with Spark in it start in half the time, in tests.

Rule 1: it is a gain of time and no more: where it cannot be had, a JVM starts as it always does,
and one that finds an archive of other classes than its own takes no notice of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pyspark
from places import place

_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -Xlog:disable"
)
"""Less is compiled and collected than pays in hours, and no class is verified."""


def archive() -> Path:
    """Where Spark's classes are, as a JVM has them in memory; whoever ran the tests first has left
    them there."""
    java = Path(os.environ.get("JAVA_HOME", ""), "bin", "java")
    found = str(java) if java.exists() else shutil.which("java") or ""
    name = f"{pyspark.__version__} {Path(found).resolve()} {Path(pyspark.__file__).resolve()}"
    return place() / f"classes-{hashlib.sha256(name.encode()).hexdigest()[:16]}.jsa"


def java_options() -> str:
    """Of a JVM that uses the archive if there is one."""
    return (
        f"{_OPTIONS} -XX:SharedArchiveFile={found}" if (found := archive()).exists() else _OPTIONS
    )


class Recording:
    """Java options of a JVM that uses the archive; or, if there is none, makes it when it ends."""

    def __init__(self) -> None:
        self._draft: Path | None = None
        self.options = java_options()
        if not archive().exists():
            for left in place().glob("classes-*.draft"):  # By a run that was killed.
                left.unlink()
            self._draft = archive().with_suffix(f".{os.getpid()}.draft")
            self.options = f"{_OPTIONS} -XX:ArchiveClassesAtExit={self._draft}"

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Have the JVM end, and keep what it made."""
        if self._draft is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # It ends with who began it.
        with contextlib.suppress(subprocess.TimeoutExpired):  # Then the next run makes it.
            process.wait(120)
            if self._draft.exists():
                self._draft.rename(archive())
