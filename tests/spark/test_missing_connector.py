"""Sessions without the connector log once that it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkFiles
from pyspark.sql.types import BinaryType, StructType

from simplebus.spark.jobs.replay import ReplayResult
from simplebus.spark.source import SimplebusSource
from simplebus.testing.server import BusServer
from tests.spark.bus_messages import publish_numbers, stored_payloads
from tests.support.programs import PATIENCE_SECONDS, environment

SENTENCE = "the data source in Python serves this session; the connector is faster: add /"
VALUE = StructType().add("value", BinaryType())


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files of a Spark application, as in a Python process of Spark."""
    monkeypatch.setattr(SparkFiles, "_root_directory", str(tmp_path))
    monkeypatch.setattr(SparkFiles, "_is_running_on_worker", True)
    return tmp_path


@pytest.mark.parametrize("is_write_first", [False, True])
def test_application_logs_the_missing_connector_once(
    application: Path, caplog: pytest.LogCaptureFixture, server: BusServer, *, is_write_first: bool
) -> None:
    options = {"servers": server.address, "class": "1"}
    for turn in range(4):
        source = SimplebusSource(options)
        if is_write_first == (turn % 2 == 0):
            source.writer(VALUE, overwrite=False)
            source.streamWriter(VALUE, overwrite=False)
        else:
            source.schema()
        assert caplog.text.count(SENTENCE) == 1
    (application / "simplebus-connector-missing").unlink()
    SimplebusSource(options).schema()
    assert caplog.text.count(SENTENCE) == 2


def test_query_that_the_connector_passes_on_logs_nothing(
    application: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SimplebusSource({"simplebus.connector": "true"}).schema()
    assert caplog.text == ""


def test_missing_connector_is_logged_without_a_folder(
    application: Path, caplog: pytest.LogCaptureFixture
) -> None:
    application.rmdir()
    SimplebusSource({}).schema()
    assert SENTENCE in caplog.text


@pytest.mark.long
@pytest.mark.spark
def test_session_without_the_connector_logs_it_once(server: BusServer, tmp_path: Path) -> None:
    publish_numbers(server, 0, 5)
    program = [sys.executable, "-m", "tests.spark.python_source_program", server.address]
    process = subprocess.run(
        [*program, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count(SENTENCE) == 1
    assert process.stdout.splitlines() == [
        str(ReplayResult(20, stored_before)) for stored_before in (0, 20)
    ]
    assert stored_payloads(server, 7) == [b"%d" % n for n in range(20)]
    assert len(stored_payloads(server, "written")) == 40
