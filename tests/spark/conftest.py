"""Spark session shared by the Spark tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simplebus.testing.server import BusServer, bus_server
from tests.support.cache_folder import cache_folder


@pytest.fixture
def server() -> Iterator[BusServer]:
    """Server of one test."""
    with bus_server() as up:
        yield up


@pytest.fixture(scope="session")
def credentials_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty file with the credentials of all processes of the Spark session."""
    path = tmp_path_factory.mktemp("credentials") / "credentials.toml"
    path.touch(0o600)
    return path


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, credentials_file: Path) -> Iterator[Any]:
    """Spark session that the tests share.

    `format("simplebus")` is the connector, and `format("simplebus_python")` the source in Python.
    """
    from pyspark.sql import SparkSession

    from simplebus.spark.java import JAR
    from simplebus.spark.java_runtime import ensure_java
    from simplebus.spark.spark_home import use_precompiled_home
    from tests.spark.fast_start import JAVA_OPTIONS
    from tests.spark.python_source import PythonSource

    ensure_java()
    place = tmp_path_factory.mktemp("spark")
    use_precompiled_home(cache_folder())
    settings = {
        "spark.jars": str(JAR),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Dderby.system.home={place}",
        "spark.sql.streaming.stopTimeout": "20s",
        # Compiling takes longer than these short queries.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.python.daemon.module": "tests.spark.forks",
    }
    builder = SparkSession.builder.master("local[2]").appName("simplebus tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        patch.setenv("SIMPLEBUS_CREDENTIALS", str(credentials_file))
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(PythonSource)
    yield session
    session.stop()
