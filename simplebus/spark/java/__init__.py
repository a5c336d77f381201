"""Spark connector in Java: its sources, below `src`, and its jar.

    build   compiles the sources to the jar, with the same bytes each time

Spark prefers a data source in a jar to one in Python with the same name. So `format("simplebus")`
is the connector in a session that has the jar, and the source in Python in others.
"""

from __future__ import annotations

from pathlib import Path

SOURCE_FOLDER = Path(__file__).with_name("src")
JAR = Path(__file__).with_name("simplebus-spark.jar")
"""The connector, for the setting `spark.jars`."""
