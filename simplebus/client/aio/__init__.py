"""Client for trio and asyncio.

    bus           `Bus`: subscribe, handle, request, fetch, explain
    traced_bus    `Bus` with distributed tracing
    publisher     `Publisher`: the publishing methods of `Bus`
    subscription  `Subscription` and `RawSubscription`
    iterators     `async for` over values, messages and batches
    handlers      calls a handler for each message of its subscription
    durables      removal of durables by operators
    connect       `connect` and `open_bus`: begin and end of a bus
    connection    reconnecting connection of a client core
    waiters       waits for confirms and replies
    writer        writes the send queue to a transport
    transport     endpoints and transports: sockets, TLS
    cancellation  detects cancellation under trio and asyncio

May import: core, logs, net, client, client.core and client.event_loop.
"""
