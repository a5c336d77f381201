"""Server side of the NATS wire format.

Reading order:
    events         commands and message batches of a client
    parser         bytes to events
    line_parser    one command at a time
    bulk_parser    many PUB commands by arrays
    subject_table  numbers for subjects
    handshake      INFO and CONNECT
    encode         messages to MSG and HMSG lines

May import `core` and the modules of `nats`, except `nats_server`.
"""
