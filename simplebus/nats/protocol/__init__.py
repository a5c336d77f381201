"""Server side of the NATS wire format.

Reading order:
    events        what a client sent, one event per command or batch of messages
    parser        bytes to events; uses line_parser (one command) and bulk_parser (arrays)
    handshake     INFO and CONNECT
    encode        messages to MSG and HMSG lines

May import `core` and the modules of `nats`.
"""
