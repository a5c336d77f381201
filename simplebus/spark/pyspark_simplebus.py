"""Spark looks for modules of this name by itself, and finds `format("simplebus")` here.

Installed as a module of the top level: `pyspark_simplebus`.
"""

from __future__ import annotations

from simplebus.spark.source import SimplebusSource as DefaultSource

__all__ = ["DefaultSource"]
