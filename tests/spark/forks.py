"""Where Spark forks its Python workers from: what each of them imports is there already.

`spark.python.daemon.module` names it. Nothing of ours is there: where workers have that from is
their own business.
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
