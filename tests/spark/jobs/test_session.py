"""Tests of session settings and of the package sent to executors, without starting a session."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simplebus.spark.java import JAR
from simplebus.spark.jobs import session
from simplebus.spark.jobs.session import configuration, is_local, write_package


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local-cluster[2,1,1024]"])
def test_local_session_listens_on_loopback_only(master: str) -> None:
    found = configuration(master)
    assert (found["spark.driver.bindAddress"], found["spark.driver.host"]) == ("127.0.0.1",) * 2
    assert found["spark.ui.enabled"] == "false"
    assert is_local(master) == (master != "local-cluster[2,1,1024]")


def test_cluster_and_user_settings_take_precedence() -> None:
    assert not {name for name in configuration("yarn") if name.startswith("spark.driver.host")}
    assert configuration("local[*]", {"spark.ui.enabled": "true"})["spark.ui.enabled"] == "true"


def test_sessions_have_the_connector_beside_the_jars_of_the_user() -> None:
    assert configuration("yarn")["spark.jars"] == str(JAR)
    assert configuration("yarn", {"spark.jars": "/a,/b"})["spark.jars"] == f"{JAR},/a,/b"


def test_executors_import_the_package_of_the_driver(tmp_path: Path) -> None:
    place = tmp_path / "simplebus.zip"
    write_package(place)
    code = (
        f"import sys; sys.path.insert(0, {str(place)!r}); import pkgutil; "
        "import simplebus.spark.read.planner; "
        "assert simplebus.__file__.startswith(sys.path[0]), simplebus.__file__; "
        "assert 'pyspark_simplebus' in {m.name for m in pkgutil.iter_modules(sys.path[:1])}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_interrupt_during_jvm_start_is_raised_afterwards() -> None:
    handler, starts = signal.getsignal(signal.SIGINT), []

    def start(*, interrupted: bool) -> None:
        with session._deferred_interrupt():
            if interrupted:
                signal.raise_signal(signal.SIGINT)
            starts.append(interrupted)

    with pytest.raises(KeyboardInterrupt):
        start(interrupted=True)
    assert signal.getsignal(signal.SIGINT) is handler
    start(interrupted=False)
    assert starts == [True, False]
