"""Python client of simplebus: drivers for trio, asyncio and blocking programs over one pure core.

    core/                 protocol state machine without I/O, and received messages
    event_loop/           clock, waiters and readable sockets under trio and asyncio
    message_types         bindings of types to message classes
    codecs                conversion of values to payloads and back
    message_builder       payload, class id and envelope of a published message
    subscribe_options     options of a subscription
    subscription_target   subscribed type or class, and the state that drivers share
    pending_confirms      waiters for confirms
    request_reply         requests and their replies
    inspect               fetch, inquire, purge
    handler_errors        errors of message handlers
    tracing/              interface of distributed tracing
    addresses, credentials, reconnect, fork_safety, context_guard    connecting
    aio/, blocking/       the drivers: Bus and BlockingBus
    dead_letters          dead-letter administration for programs

May import `simplebus.core`, `simplebus.logs` and `simplebus.net.tls`.
"""
