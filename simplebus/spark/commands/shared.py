"""What the commands of `simplebus pipeline` have in common: options, a session, and its errors.

Rule 1: nothing of Spark is imported before a command runs.
Rule 2: what goes wrong is one sentence on standard error and an exit status, never a traceback.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import option, parse_pattern
from simplebus.console.errors import fail, describe_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVERS = "127.0.0.1:8888"
INTERRUPTED = 130
NEEDS_SPARK = 'this needs Spark, which comes with pip install "simplebus-broker[spark]"'


class Format(enum.StrEnum):
    """What an archive is."""

    PARQUET = "parquet"
    DELTA = "delta"


def parse_setting(text: str | tuple[str, str]) -> tuple[str, str]:
    """A setting of Spark's, from KEY=VALUE. Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE")
    return name.strip(), value.strip()


Servers = Annotated[
    str,
    option(
        "--servers",
        "Where the buses listen, as HOST:PORT, several with commas.",
        metavar="HOST:PORT,…",
    ),
]
Master = Annotated[
    str,
    option(
        "--master",
        "Where Spark works: local[*] is every core of this machine; or a cluster's address, such "
        "as spark://HOST:7077, yarn or k8s://….",
        metavar="MASTER",
    ),
]
Channels = Annotated[
    list[str] | None,
    typer.Option(
        "--channel",
        parser=parse_pattern,
        metavar="PATTERN",
        show_default="all messages",
        help="Only messages on channels like this one. May be given several times.",
    ),
]
Set = Annotated[
    list[Any] | None,
    typer.Option(
        "--set",
        parser=parse_setting,
        metavar="KEY=VALUE",
        show_default=False,
        help="A setting of Spark's own, such as spark.driver.memory=4g. May be given several "
        "times.",
    ),
]


@contextmanager
def spark_session(
    name: str, master: str, settings: Sequence[tuple[str, str]] | None
) -> Iterator[SparkSession]:
    """A session for a block, which ends with it.

    What the block dies of becomes one sentence and exit status 1; KeyboardInterrupt 130.
    """
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        fail(NEEDS_SPARK)
    # Spark would log what it raises, with everything that it knows about it.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    from simplebus.spark.java import JavaError
    from simplebus.spark.jobs.progress import reason
    from simplebus.spark.jobs.session import session

    spark = None
    try:
        spark = session(name, master=master, settings=dict(settings or ()), apart=True)
        yield spark
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (JavaError, OSError) as error:
        fail(describe_error(error))
    except Exception as error:
        fail(reason(error))
    finally:
        if spark is not None:
            spark.stop()
