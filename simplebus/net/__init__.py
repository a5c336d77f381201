"""Network connections shared by servers, clients and bridges.

    tls              `TlsSocket`: TLS over a non-blocking socket
    nats_connection  `NatsConnection`: connection to a NATS cluster that reconnects

May import `core`, `logs` and `nats.client`.
"""
