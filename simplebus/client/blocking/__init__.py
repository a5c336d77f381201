"""Client without an event loop: every call reads and writes in the caller's thread.

    bus           `BlockingBus`: subscribe, handle, request, fetch, explain
    traced_bus    `BlockingBus` with distributed tracing
    connect       `connect_blocking`: begin and end of a bus
    publisher     `BlockingPublisher`: the publishing methods of `BlockingBus`
    subscription  `BlockingSubscription` and `BlockingRawSubscription`
    iterators     `for` over messages and batches
    handlers      calls a handler for each message of its subscription
    connection    reconnecting connection of a client core
    socket_steps  connects a socket, in steps that do not block

Methods, arguments and errors are those of the async client.

May import: core, logs, net, client, client.core and client.aio.
"""
