"""TLS for all listeners.

- `certificates`: options, certificate files and their checks
- `handshake`: server handshakes, and binary connections over TLS
- `nats_upgrade`: NATS connections that start TLS after INFO

May import: core, nats, net, and the sibling package `preauth`.
"""
