"""The source in Python under a name of its own, beside the connector."""

from __future__ import annotations

from simplebus.spark.source import SimplebusSource


class PythonSource(SimplebusSource):
    """`format("simplebus_python")`."""

    @classmethod
    def name(cls) -> str:
        return "simplebus_python"
