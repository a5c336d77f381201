"""Spark session with `format("simplebus")`, on this machine or on a cluster.

A local session listens on loopback only and serves no Spark UI. The user's settings take
precedence. A session on a cluster ships this package to the executors.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import struct
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import TYPE_CHECKING

from simplebus.spark.java import JAR
from simplebus.spark.java_runtime import cache_folder, ensure_java
from simplebus.spark.spark_home import use_precompiled_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
_LOOPBACK = "127.0.0.1"
_PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
_REGISTRATION = _PACKAGE_FOLDER / "spark" / "pyspark_simplebus.py"
_LOGGING = Path(__file__).with_name("log4j2.properties")
# Spark checks nulls and bounds before it reads a value from Arrow, so Arrow need not check again.
_ARROW_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"


def is_local(master: str) -> bool:
    """Return True if the executors are threads of the driver."""
    return master == "local" or master.startswith("local[")


def is_this_machine(master: str) -> bool:
    """Return True if the executors are threads or processes on this machine."""
    return is_local(master) or master.startswith("local-cluster[")


def configuration(master: str, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return Spark's settings for a master. The jar of the connector precedes the user's jars.

    Args:
        master: Spark's master, such as `local[*]`.
        settings: Settings of the user, by name; they take precedence.
    """
    settings_by_name = {
        # Other programs expect the standard Parquet type of timestamps, not Hive's INT96.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} {_ARROW_OPTIONS}"
        ),
        "spark.executor.extraJavaOptions": _ARROW_OPTIONS,
    }
    if is_this_machine(master):
        settings_by_name |= {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.ui.enabled": "false",
            # Enough for two Arrow batches per core and Spark's own needs.
            "spark.driver.memory": "2g",
            # Shuffles are small here; 200 empty tasks would take longer than the work.
            "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
        }
    settings_by_name |= dict(settings or {})
    jars = [str(JAR), settings_by_name.get("spark.jars", "")]
    return settings_by_name | {"spark.jars": ",".join(filter(None, jars))}


def session(
    name: str,
    *,
    master: str = LOCAL,
    settings: Mapping[str, str] | None = None,
    own_process_group: bool = False,
) -> SparkSession:
    """Return a new session with `format("simplebus")`, or the running one.

    On a cluster, the executors get this package as a zip; their Pythons must have numpy, msgspec,
    anyio and pyarrow installed.

    Args:
        name: Name of the application.
        master: Spark's master.
        settings: Spark's settings, by name.
        own_process_group: True to start the JVM in its own process group, so that Ctrl-C does not
            reach Spark and the program decides when its tasks end.

    Raises:
        JavaError: No supported Java was found.
        ImportError: pyspark is not installed.
    """
    ensure_java()
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if is_this_machine(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    if is_local(master):
        use_precompiled_home(cache_folder())
    conf = SparkConf().setMaster(master).setAppName(name)
    conf.setAll(list(configuration(master, settings).items()))
    if (
        own_process_group
        and SparkContext._active_spark_context is None
        and SparkContext._gateway is None
    ):
        # Signals from the terminal do not reach another process group.
        with _deferred_interrupt():
            gateway = launch_gateway(conf, {"process_group": 0})
        SparkContext(conf=conf, gateway=gateway)
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    if not is_local(master):
        ship_package(spark)
    return spark


def activate_session(spark: SparkSession) -> None:
    """Make a session the active one of this thread.

    `save` of a frame finds a data source in Python through the active session only.
    """
    assert spark._jvm is not None
    spark._jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, so that a half-launched JVM is not orphaned."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


def ship_package(spark: SparkSession) -> None:
    """Send this package to the executors of a cluster."""
    target = Path(tempfile.mkdtemp(prefix="simplebus-")) / "simplebus.zip"
    write_package(target)
    spark.sparkContext.addPyFile(str(target))


def write_package(target: Path) -> None:
    """Write this package as an importable zip of sources and bytecode.

    Without bytecode, each Python worker would compile the package again. Another version of Python
    ignores the bytecode and compiles the sources.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        _add_file(packed, _REGISTRATION, _REGISTRATION.name)
        for path in sorted(_PACKAGE_FOLDER.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                _add_file(packed, path, str(path.relative_to(_PACKAGE_FOLDER.parent)))


def _add_file(packed: zipfile.ZipFile, path: Path, name: str) -> None:
    packed.write(path, name)
    if path.suffix == ".py":
        code = compile(path.read_bytes(), name, "exec", dont_inherit=True)
        status = path.stat()
        stamp = struct.pack("<LLL", 0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size)
        packed.writestr(f"{name}c", MAGIC_NUMBER + stamp + marshal.dumps(code))
