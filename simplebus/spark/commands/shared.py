"""Common options of the `simplebus pipeline` commands, their Spark session and its errors.

Errors become one sentence on standard error and an exit status, never a traceback.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import HOSTS, PORT_MAX, option, parse_digits, parse_pattern
from simplebus.console.errors import describe_error, fail
from simplebus.console.installation import install_command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_SERVERS = "127.0.0.1:8888"
INTERRUPTED_STATUS = 130
NEEDS_SPARK = (
    f"this command needs Spark: run {install_command('spark')} in a clone of the repository"
)


class ArchiveFormat(enum.StrEnum):
    """File format of an archive."""

    PARQUET = "parquet"
    DELTA = "delta"


class PartitionPeriod(enum.StrEnum):
    """Length of time of a folder of an archive."""

    DAY = "day"
    HOUR = "hour"


def parse_setting(text: str | tuple[str, str]) -> tuple[str, str]:
    """Parse a Spark setting, KEY=VALUE. Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE")
    return name.strip(), value.strip()


ServersOption = Annotated[
    str,
    option(
        "--servers",
        "Where the buses listen, as HOST:PORT, several with commas.",
        metavar="HOST:PORT,…",
    ),
]
MasterOption = Annotated[
    str,
    option(
        "--master",
        "Where Spark works: local[*] is every core of this machine; or a cluster's address, such "
        "as spark://HOST:7077, yarn or k8s://….",
        metavar="MASTER",
    ),
]
ChannelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--channel",
        parser=parse_pattern,
        metavar="PATTERN",
        show_default="all messages",
        help="Only messages on channels that match this pattern. May be repeated.",
    ),
]


def parse_listen_address(text: str | tuple[str, int]) -> tuple[str, int]:
    """Parse a port, or an address and port. Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    host, _, port = text.rpartition(":")
    number = parse_digits(port, PORT_MAX)
    if number is None:
        raise typer.BadParameter(
            f"{text!r} is not an address; expected a port such as 8230, or 0.0.0.0:8230"
        )
    return host.strip("[]") or HOSTS[0], number


PipelineHttpOption = Annotated[
    Any,
    option(
        "--http",
        "Serve /healthz and /metrics over HTTP on this port, or address and port. A port alone is "
        "reachable from this machine only.",
        parser=parse_listen_address,
        metavar="[ADDRESS:]PORT",
        show_default="no HTTP",
    ),
]
SettingsOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--set",
        parser=parse_setting,
        metavar="KEY=VALUE",
        show_default=False,
        help="A Spark setting, such as spark.driver.memory=4g. May be repeated.",
    ),
]


@contextmanager
def spark_session(
    name: str, master: str, settings: Sequence[tuple[str, str]] | None
) -> Iterator[SparkSession]:
    """Create a session for the duration of a block.

    Exceptions in the block become one sentence and exit status 1; KeyboardInterrupt status 130.
    """
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        fail(NEEDS_SPARK)
    # Spark logs every exception with its whole context.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    from simplebus.spark.java_runtime import JavaError
    from simplebus.spark.jobs.progress import error_sentence
    from simplebus.spark.jobs.session import session

    spark = None
    try:
        spark = session(name, master=master, settings=dict(settings or ()), own_process_group=True)
        yield spark
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None
    except (JavaError, OSError) as error:
        fail(describe_error(error))
    except Exception as error:
        fail(error_sentence(error))
    finally:
        if spark is not None:
            spark.stop()
