"""JVM options that shorten the start of Spark in tests.

An archive of Spark's classes would save a third of each JVM's start. It is not used, because
creating it takes longer than all starts of a test run, and most runs would have to create it.
"""

from __future__ import annotations

JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-Xms512m -XX:MetaspaceSize=256m "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -Xlog:disable"
)
"""Less is compiled and collected than pays in hours, and no class is verified. With a large heap
and metaspace from the start, loading the classes causes no full collection.
"""
