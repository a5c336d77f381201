"""Build of the connector's jar.

    python -m simplebus.spark.java.build

It needs `javac` of a JDK and the jars of pyspark. Equal sources and an equal JDK give an equal jar:
entries are sorted, have a fixed time and are not compressed, since compression differs between
machines. The jar contains a digest of its sources, by which a stale jar is found without a JDK.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from simplebus.spark.java import JAR, SOURCE_FOLDER
from simplebus.spark.option_names import encode_table

RELEASE = 17
"""Java version of the class files, the lowest that Spark 4 supports."""
_MANIFEST = "META-INF/MANIFEST.MF"
_DIGEST = "META-INF/simplebus-sources.sha256"
_TIMEOUT_SECONDS = 300.0
_ENTRY_TIME = (1980, 1, 1, 0, 0, 0)
"""Earliest time of a zip entry."""


class BuildError(RuntimeError):
    """The jar cannot be built."""


def source_files() -> list[Path]:
    """Return the files that the jar is built from, in the order of their paths."""
    return sorted(path for path in SOURCE_FOLDER.rglob("*") if path.is_file())


def generated_files() -> dict[str, bytes]:
    """Return the files of the jar that are generated from Python, by path."""
    return {"io/simplebus/spark/options.json": encode_table().encode()}


def digest_sources() -> str:
    """Return the digest of all source files and generated files with their paths."""
    digest = hashlib.sha256()
    files = {
        path.relative_to(SOURCE_FOLDER).as_posix(): path.read_bytes() for path in source_files()
    }
    for path, content in (files | generated_files()).items():
        digest.update(f"{path}\0".encode())
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def read_digest(jar: Path) -> str:
    """Return the digest of the sources that a jar was built from."""
    with zipfile.ZipFile(jar) as packed:
        return packed.read(_DIGEST).decode()


def javac_version() -> int | None:
    """Return the major version of `javac`; None if PATH has no `javac`."""
    javac = shutil.which("javac")
    if javac is None:
        return None
    process = subprocess.run(
        [javac, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
    )
    found = re.search(r"javac (\d+)", process.stdout + process.stderr)
    return int(found[1]) if found else None


def build(jar: Path) -> None:
    """Compile the sources and write the jar.

    Args:
        jar: Path of the jar, which is replaced.

    Raises:
        BuildError: There is no javac or no pyspark, or the sources do not compile.
    """
    if javac_version() is None:
        raise BuildError(
            "there is no javac on PATH; install a JDK, such as openjdk-17-jdk-headless"
        )
    found = find_spec("pyspark")
    if found is None or not found.origin:
        raise BuildError("pyspark is not installed; its jars are needed to compile")
    jars = Path(found.origin).parent / "jars" / "*"
    with tempfile.TemporaryDirectory(prefix="simplebus-java-") as folder:
        sources = [str(path) for path in source_files() if path.suffix == ".java"]
        # A short run: compiling javac itself less takes a third of the time.
        arguments = ["-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", "--release", str(RELEASE)]
        arguments += ["-Xlint:all,-path,-classfile,-serial", "-Werror"]
        process = subprocess.run(
            ["javac", *arguments, "-encoding", "UTF-8", "-cp", str(jars), "-d", folder, *sources],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        if process.returncode != 0:
            raise BuildError(f"the sources do not compile:\n{process.stdout}{process.stderr}")
        _write_jar(jar, _entries(Path(folder)))


def _entries(classes: Path) -> dict[str, bytes]:
    """Return the content of the jar by path."""
    found = {_MANIFEST: b"Manifest-Version: 1.0\r\n\r\n", _DIGEST: digest_sources().encode()}
    found |= generated_files()
    for path in classes.rglob("*.class"):
        found[path.relative_to(classes).as_posix()] = path.read_bytes()
    for path in source_files():
        if path.suffix != ".java":
            found[path.relative_to(SOURCE_FOLDER).as_posix()] = path.read_bytes()
    return found


def _write_jar(jar: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_STORED) as packed:
        for name in sorted(entries, key=lambda name: (name != _MANIFEST, name)):
            packed.writestr(zipfile.ZipInfo(name, _ENTRY_TIME), entries[name])


if __name__ == "__main__":
    try:
        build(JAR)
    except BuildError as error:
        sys.exit(str(error))
    print(f"built {JAR}")
