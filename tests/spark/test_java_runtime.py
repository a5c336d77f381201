"""Tests of the choice of Java for Spark, and of the error if no Java is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from simplebus.spark.java_runtime import (
    JavaEnvironment,
    JavaError,
    choose_java,
    parse_version,
    write_shim,
)


@pytest.mark.parametrize(
    ("found", "shim"),
    [
        (JavaEnvironment(home="/j", home_version=17), ""),
        (JavaEnvironment(home="/j", home_version=25, bundled="/b"), ""),
        (JavaEnvironment(path_version=21, bundled="/b"), ""),
        (JavaEnvironment(path_version=11, bundled="/b"), "/b"),
        (JavaEnvironment(bundled="/b"), "/b"),
    ],
)
def test_configured_java_takes_precedence(found: JavaEnvironment, shim: str) -> None:
    assert choose_java(found) == shim


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            JavaEnvironment(home="/j", home_version=11, bundled="/b"),
            "JAVA_HOME is /j, where there is Java 11",
        ),
        (
            JavaEnvironment(home="/j"),
            "no Java that runs; Spark needs Java 17 or newer: point JAVA_HOME",
        ),
        (
            JavaEnvironment(path_version=8),
            'on PATH is Java 8.*pip install "\\.\\[spark\\]" in a clone',
        ),
        (JavaEnvironment(), "on PATH is no Java that runs"),
    ],
)
def test_missing_java_is_reported_with_a_remedy(found: JavaEnvironment, sentence: str) -> None:
    with pytest.raises(JavaError, match=sentence):
        choose_java(found)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("command not found", None),
    ],
)
def test_java_version_is_parsed(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_script_removes_one_argument_only(tmp_path: Path) -> None:
    java = tmp_path / "it's here" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text('#!/bin/sh\nprintf "[%s]" "$@"\n')
    java.chmod(0o755)
    shim = write_shim(str(java.parent.parent), tmp_path / "cache")
    assert write_shim(str(java.parent.parent), tmp_path / "cache") == shim
    words = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "$HOME", "--add-modules=x"]
    process = subprocess.run(
        [shim / "bin" / "java", *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout == "[-cp][a b][][$HOME][--add-modules=x]"
