"""What lets a JVM with Spark in it start sooner, in tests.

Rule 1: a gain that is there in the first run of the tests. An archive of Spark's classes saves each
JVM a third of its start, but to make it takes longer than all of them: most runs are the first.
"""

from __future__ import annotations

JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -Xlog:disable"
)
"""Less is compiled and collected than pays in hours, and no class is verified."""
