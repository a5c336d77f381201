"""Consumption from streams: consumers of positions, their feeds and acknowledgements.

    acked_sequences    acknowledged stream sequences, to recognize redelivered messages
    ack_all            consumer of one server, acknowledged up to a message
    dead_letters       messages whose dead letters are not stored yet
    returned_messages  return of unacknowledged messages to a consumer
    feed               messages of one position: request, receive, acknowledge
    handover           plain consumers that this server is about to release
    durable_check      access and delivery policy of durables and groups
    inboxes            connection subscriptions of the feeds
    consumers          creation, take-over, replacement and removal of consumers
    catch_up           wait until a position has received everything stored
    close              closing of a position in the cluster, with retries

May import the rest of `jetstream` except `backend`, `backlog`, `fetch` and `trim`.
"""
