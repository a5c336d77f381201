"""Agreement between the stateless servers of one JetStream cluster.

    cluster_id      identity of the bus, stored in the cluster
    class_names     exchange of class names between servers
    peers           queries to the other servers
    stream_update   replica and storage settings of existing streams
    failover        reconnection to a NATS server at which JetStream answers
    limits_check    checks before a server starts: message size, streams, identity

May import `publish` and the modules of `jetstream` below it, not `consume`.
"""
