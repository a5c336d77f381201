"""Monitoring data and its HTTP representations, without I/O.

Snapshots, requests and the time go in, responses come out; `server.http` owns the sockets. Nothing
here changes the bus, and every response is bounded.

- `snapshot`: `MonitorSnapshot`, the state of a program as plain values
- `metrics_builder`: collects metrics value by value
- `class_metrics`, `bus_tables`: metrics, tables and notes of a bus
- `dashboard`: `Dashboard` caches snapshots and keeps rates of the last minutes
- `exposition`: metrics in the Prometheus formats
- `requests`: requests, responses and routes
- `page`: the live page

May import: core, nats.
"""
