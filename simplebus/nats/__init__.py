"""NATS protocol: a server for NATS clients, a client for NATS servers, and the link to the bus.

Reading order:
    subjects, numbers    subject syntax; bulk parsing of decimal numbers
    class_requests       canonical subjects that request a class
    subject_permissions  allowed and denied subjects of a user, as configured
    users                users of a NATS listener and the check of their credentials
    limits, settings     bounds and configuration of the NATS server
    errors, statistics   `-ERR` texts of nats-server; counters
    protocol             server side of the wire format: bytes to events, messages to bytes
    server               sessions, routing, permissions, slow consumers
    bus                  bound subjects, acked subscriptions, bus messages for NATS clients
    nats_server          `NatsServer`, which connects all of these
    client               client side of the wire format and of JetStream

Bridges and the `jetstream` package use `client`. Nothing here does I/O or reads a clock. Imports
only `core`.
"""
