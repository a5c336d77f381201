"""Reports to Spark, as one sentence, of errors that a user can correct."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from simplebus.core.errors import BusError


@contextlib.contextmanager
def report_without_traceback() -> Iterator[None]:
    """Hide the traceback of errors that an option, a row or a bus causes.

    Spark reads the variable when it reports the error that ends the process of its Python worker,
    so no other error is affected.
    """
    try:
        yield
    except (ValueError, BusError):
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
