"""Sources from which a copier reads messages.

bus             a class of a bus
stream          a JetStream stream
pull_consumer   pull requests to one consumer of a stream
core_nats       subjects of a NATS server, without JetStream
identity        detects a source that was restored from an old copy
lag             messages that the target has not confirmed

May import the bridge's own modules, client, nats, net, logs and core.
"""
