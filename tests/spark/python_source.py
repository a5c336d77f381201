"""The Python source under a separate name, so that the Java connector can be used beside it."""

from __future__ import annotations

from simplebus.spark.source import SimplebusSource


class PythonSource(SimplebusSource):
    """`format("simplebus_python")`."""

    @classmethod
    def name(cls) -> str:
        return "simplebus_python"
