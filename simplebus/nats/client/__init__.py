"""Client side of the NATS protocol, without I/O, clock or randomness.

Reading order:
    events, line_parser, bulk_parser, parser   bytes of a server to events
    encode                                     SUB, PUB and HPUB, single and in batches
    credentials                                CONNECT credentials
    client                                     `NatsClientCore`: PINGs, subscriptions, requests
    jetstream_types, jetstream_codec           JetStream API, PubAcks, ack subjects and acks

After a reconnect the same core sends its subscriptions again, but no requests or publications.
May import `core` and `nats.numbers`.
"""
