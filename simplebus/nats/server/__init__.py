"""NATS server without I/O: a driver brings bytes and clock readings and sends the outboxes.

Reading order:
    server               `NatsServer`: connect, publish, subscribe, liveness checks
    session, outbox      state and output of one client
    subscription         delivery to one subscription
    queue_group          delivery to one member of a queue group
    routes               subjects to sinks, with cached results
    subscription_memory  memory bound of all subscriptions
    users, authenticate  NATS users and the check of CONNECT
    permissions          subject permissions; class_permissions applies class permissions to
    subjects
    slow_consumers       publisher stalls and disconnection of slow clients

May import `core` and the other packages of `nats`, except `client`.
"""
