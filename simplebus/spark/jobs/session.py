"""A Spark session that fits: on this machine or on a cluster, with this package where the work is.

Rule 1: `configuration` is pure: what was asked for in, Spark's settings out. The rest is a shell.
Rule 2: on this machine nothing listens but on loopback, and no page of Spark's own is served; what
a user sets himself wins.
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

from simplebus.spark.java import cache_folder, ensure_java
from simplebus.spark.spark_home import quick_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
_LOOPBACK = "127.0.0.1"
_PACKAGE = Path(__file__).resolve().parents[2]
_REGISTRATION = _PACKAGE / "spark" / "pyspark_simplebus.py"
_LOGGING = Path(__file__).with_name("log4j2.properties")
# Spark has looked whether a value is there, and where it ends, before it asks Arrow for it.
_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"


def is_local(master: str) -> bool:
    """Whether the executors are threads of the driver."""
    return master == "local" or master.startswith("local[")


def is_here(master: str) -> bool:
    """Whether the executors are on this machine, be they threads or processes."""
    return is_local(master) or master.startswith("local-cluster[")


def configuration(master: str, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Spark's settings for a master. What `settings` say is taken as it is."""
    found = {
        # Files that other programs read: times as they define them, not as Hive once did.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} {_UNCHECKED}"
        ),
        "spark.executor.extraJavaOptions": _UNCHECKED,
    }
    if is_here(master):
        found |= {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.ui.enabled": "false",
            # Two of Arrow's batches for each core, and what Spark wants for itself, fit in easily.
            "spark.driver.memory": "2g",
            # Shuffles are small here; 200 empty tasks would take longer than the work.
            "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
        }
    return found | dict(settings or {})


def session(
    name: str,
    *,
    master: str = LOCAL,
    settings: Mapping[str, str] | None = None,
    apart: bool = False,
) -> SparkSession:
    """A session, or the one that runs already; `format("simplebus")` is known to it.

    `settings` are Spark's own, by name. A master that is elsewhere gets this package, zipped; what
    it depends on (numpy, msgspec, anyio, pyarrow) its Pythons must have. `apart` has Spark hear no
    Ctrl-C: then the program decides when its tasks end.

    Raises JavaError when there is no Java that fits, ImportError when there is no pyspark.
    """
    ensure_java()
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if is_here(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    if is_local(master):
        quick_home(cache_folder())
    conf = SparkConf().setMaster(master).setAppName(name)
    conf.setAll(list(configuration(master, settings).items()))
    if apart and SparkContext._active_spark_context is None and SparkContext._gateway is None:
        # A group of its own: what a terminal sends to ours does not reach it.
        with _uninterrupted():
            gateway = launch_gateway(conf, {"process_group": 0})
        SparkContext(conf=conf, gateway=gateway)
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    if not is_local(master):
        ship(spark)
    return spark


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts at the end of the block: a JVM that is launched by half is one nobody ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        raise KeyboardInterrupt


def ship(spark: SparkSession) -> None:
    """Have executors elsewhere import this package as it is here."""
    place = Path(tempfile.mkdtemp(prefix="simplebus-")) / "simplebus.zip"
    write_package(place)
    spark.sparkContext.addPyFile(str(place))


def write_package(place: Path) -> None:
    """This package as a zip that Python imports from: its sources, and what this Python makes of
    them, or else each process of each task would make it anew. Another version of Python, whose
    would be different, takes the sources."""
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        _pack(packed, _REGISTRATION, _REGISTRATION.name)
        for path in sorted(_PACKAGE.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                _pack(packed, path, str(path.relative_to(_PACKAGE.parent)))


def _pack(packed: zipfile.ZipFile, path: Path, name: str) -> None:
    packed.write(path, name)
    if path.suffix == ".py":
        code = compile(path.read_bytes(), name, "exec", dont_inherit=True)
        status = path.stat()
        stamp = struct.pack("<LLL", 0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size)
        packed.writestr(f"{name}c", MAGIC_NUMBER + stamp + marshal.dumps(code))
