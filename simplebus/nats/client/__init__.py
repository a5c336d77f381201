"""The client's half of the NATS text protocol: pure, bytes in and bytes out.

    events  lines  scan  parser      what a server says: INFO, MSG and HMSG in batches, PING, -ERR
    writing                          what a client says: SUB, PUB and HPUB in batches
    credentials  connect             who it is: CONNECT
    core                             the conversation: PINGs, subscriptions, requests by number
    jetstream                        JetStream's words: API, PubAck, ack subjects, +ACK

Rule 1: no clock, no socket, no chance: a time, an inbox and a nonce's signature come as arguments.
Rule 2: whoever reconnects brings a fresh socket to the same core: subscriptions are said again,
requests and publications are not; who made them is told that the connection was lost.
"""
