"""Bridges: copy messages from one bus to another, and to and from NATS servers.

settings           bridges and the classes that they copy
interfaces         the protocols MessageSource and MessageTarget, and the batches between them
copier             copies one class from a source to a target
source/            sources: a bus, core NATS subjects, a JetStream stream; and the lag
target/            targets: a bus, a stateless server, a NATS server, a JetStream stream
transform          rewrites frames of the source for the target
channel_map        rules that rename channels
loop_header        the `bridge-path` header, which prevents loops
reserved_headers   headers and subjects that belong to the NATS server
nats_frames        converts NATS messages to frames of a bus
checkpoint         the bridge record, which the target stores for the next connection
dead_letters       dead letters for messages that the target refuses
bus_connection     one connection to a bus
nats_connection    one connection to a NATS server
build, runner      create copiers from settings, and run them
metrics            metrics and the page for operators

May import monitor, server, client, nats, net, logs and core.
"""
