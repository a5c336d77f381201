"""Connection between NATS clients and the classes of the broker.

Reading order:
    bus_session  `BusAdapter`: local sessions of NATS clients, storing, acked subscriptions, acks
    bindings     messages on bound subjects are stored in classes
    convert      NATS messages to envelopes and back
    bus_to_nats  messages of binary clients are delivered to NATS subscriptions
    acked        acked subscriptions: parsing `$SB.SUB.` subjects, deliveries, ack payloads
    subjects     canonical form of subjects that request a class

May import `core` and the other packages of `nats`, except `client`.
"""
