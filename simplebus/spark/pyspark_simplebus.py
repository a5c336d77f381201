"""Registration of `format("simplebus")`: Spark imports every top-level module `pyspark_*`.

Installed as the top-level module `pyspark_simplebus`.
"""

from __future__ import annotations

from simplebus.spark.source import SimplebusSource as DefaultSource

__all__ = ["DefaultSource"]
