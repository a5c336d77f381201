"""Python worker daemon that imports the workers' dependencies before Spark forks them.

`spark.python.daemon.module` names this module. It does not import simplebus, because each worker
must find the package by itself.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # A process with threads is not to be forked.

import pandas  # noqa: F401
import pyarrow  # noqa: F401
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
