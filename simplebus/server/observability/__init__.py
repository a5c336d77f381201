"""Measurements of a running server.

- `message_rates`: rates for the systemd status and for `--verbose`
- `latency`: publish-to-confirm and publish-to-ack latencies, event loop delay
- `message_spans`: selects the messages of which a server makes spans
- `loop_watchdog`: a thread that reports a stalled event loop

May import: console, core, logs, nats.
"""
