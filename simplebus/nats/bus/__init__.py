"""Connection between NATS clients and the classes of the broker.

Reading order:
    bus_adapter  `BusAdapter`: local sessions of NATS clients, storing, acked subscriptions, acks
    bindings     messages on bound subjects are stored in classes
    convert      NATS messages to envelopes and back
    bus_to_nats  messages of binary clients are delivered to NATS subscriptions
    acked        acked subscriptions: parsing `$SB.SUB.` subjects, deliveries, ack payloads

May import `core`, the modules of `nats` except `nats_server`, `nats.protocol` and `nats.server`.
"""
