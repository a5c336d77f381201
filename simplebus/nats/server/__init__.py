"""State of the NATS server without I/O; `nats.nats_server` connects it with clients and the bus.

Reading order:
    session              state and subscriptions of one client
    outbox               output of one client
    routes               subjects to sinks, with cached results
    message_delivery     delivery to the sinks of a subject, in turns of limited cost
    queue_group          delivery to one member of a queue group
    subscription_memory  memory bound of all subscriptions
    authenticate         check of CONNECT
    permissions          cached decisions about subjects
    class_permissions    class permissions applied to subjects
    slow_consumers       publisher stalls and disconnection of slow clients

May import `core`, the modules of `nats` except `nats_server`, and `nats.protocol`.
"""
