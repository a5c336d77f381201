"""Targets to which a copier sends messages.

bus              a class of a bus, or of a stateless server
nats             subjects of a NATS server, or a stream without replicas
ordered_stream   a stream that may change its leader: few messages in flight
batched_stream   a stream with fast batches (nats-server 2.14)

May import the bridge's own modules, source, client, nats, net, logs and core.
"""
