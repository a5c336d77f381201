"""NATS protocol: a server for NATS clients, a client for NATS servers, and the link to the bus.

Reading order:
    subjects, numbers   subject syntax; bulk parsing of decimal numbers
    limits, settings    bounds and configuration of the NATS server
    errors, statistics  `-ERR` texts of nats-server; counters
    protocol            server side of the wire format: bytes to events, messages to bytes
    server              sessions, subscriptions, routing, permissions, slow consumers
    bus                 subjects bound to classes, acked subscriptions, bus messages for NATS
    clients
    client              client side of the wire format and of JetStream, used by bridges and
    `jetstream`

Nothing here does I/O or reads a clock. Imports only `core`.
"""
