"""The committed jar of the connector is built from the committed sources."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from simplebus.spark.java import JAR
from simplebus.spark.java.build import (
    RELEASE,
    build,
    digest_sources,
    javac_version,
    read_digest,
    source_files,
)

BUILD = "run `python -m simplebus.spark.java.build` and commit the jar"


def test_jar_is_of_the_present_sources() -> None:
    assert read_digest(JAR) == digest_sources(), BUILD


@pytest.mark.long
def test_rebuilt_jar_is_the_same(tmp_path: Path) -> None:
    found = javac_version()
    if found != RELEASE and not os.environ.get("CI"):
        pytest.skip(f"needs javac {RELEASE}, found {found}")
    assert found == RELEASE, f"the tests need javac {RELEASE}, as .ci/run installs it"
    build(tmp_path / "rebuilt.jar")
    assert (tmp_path / "rebuilt.jar").read_bytes() == JAR.read_bytes(), BUILD


def test_jar_registers_the_connector() -> None:
    with zipfile.ZipFile(JAR) as packed:
        names = packed.namelist()
        service = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
        source = packed.read(service).decode().strip()
    assert f"{source.replace('.', '/')}.class" in names
    assert {name.split("/")[0] for name in names} == {"META-INF", "io"}


def test_every_source_has_a_comment() -> None:
    for path in source_files():
        assert path.suffix != ".java" or "/**" in path.read_text(), path
