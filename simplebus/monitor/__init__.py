"""Monitoring data and its HTTP representations, without I/O.

Snapshots, requests and the time go in, responses come out; `server.http` owns the sockets. Nothing
here changes the bus, and every response is bounded.

- `snapshot`: `MonitorSnapshot`, the state of a program as plain values
- `metrics_builder`: collects metrics value by value
- `bus_facts`: the state of a bus as plain values, collected in one pass
- `bus_metrics`, `bus_tables`: metrics, tables and notes made from these values
- `rate_series`: `RateSeries` keeps rates in steps of one length
- `dashboard`: `Dashboard` caches snapshots and keeps rates of the last day
- `exposition`: metrics in the Prometheus formats
- `requests`: requests, responses and routes
- `page`: the live page

May import: core, nats.
"""
