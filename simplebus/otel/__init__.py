"""Tracing and metrics with OpenTelemetry, which the extra `otel` installs.

- `conventions`: names of attributes and instruments
- `instruments`: `ClientInstruments`, the metrics of a client
- `tracing`: `OpenTelemetryTracing`, the spans of a client
- `server_spans`: `ServerSpans`, the spans of a server

Uses the API of OpenTelemetry. A program configures the SDK, which samples and exports.

May import: core, client.
"""

from simplebus.otel.tracing import OpenTelemetryTracing

__all__ = ["OpenTelemetryTracing"]
