"""Storage of all classes in a JetStream cluster: stateless servers (`simplebus serve --engine`).

A stateless server stores no messages. It accepts them, publishes them to streams and feeds its
subscriptions from consumers. The broker stays unchanged: positions decide about delivery,
redelivery and dead letters. A confirmed message is stored in the cluster, and a message is
acknowledged to the cluster only after it is acknowledged here, so a crash redelivers but loses
nothing. See protocol/engine.md.

    names, settings, api    names in JetStream, options, request and reply bodies
    class_jobs              sequential and concurrent requests per class
    stream_clock            server time of a stream
    remote_class            message class whose messages are stored in a stream
    publish/                write batches to streams
    cluster/                identity, class names, peers, limits and failover
    consume/                positions: consumers, feeds, acknowledgements, hand-over
    fetch, trim, backlog    read, purge, trim and count stored messages
    backend                 connects the broker to all of the above

May import `core`, `nats`, `logs` and `net`.
"""
