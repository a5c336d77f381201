"""Delivery state of positions: acknowledgements, redelivery timers, delays and failure reasons.

Steps of a redelivery, all in `core.subscription`:
    1. A message is overdue (`Position.tick`) or rejected (`Position.nack`, which schedules it with
       its backoff, for a later `tick` or `handle_wakeup`; with a delay of 0 it is queued at once).
    2. Its span is appended to `UnackedMessages.queue`, and the caller queues the subscription
       in its outbox.
    3. The outbox asks for frames: `Position.select_redeliveries` takes the next span.
    4. A span below its delivery limit is sent again and scheduled in `UnackedMessages._ack_timer`.
       A span at the limit becomes dead letters: `_give_up_leading` moves it to
       `UnackedMessages.pending_dead_letters`, as `terminate` does at once. The store appends those
       in later turns, when there is space.

A message at its limit is given up only in step 3, and therefore never while its durable has no
session. In a group each member has an ack timer; `Position.tick` queues the overdue messages of all
members.

Modules in reading order:
    sequence_set       sets of sequences, stored as ranges
    ack_window         sequences that a position has acknowledged
    timer_wheel        timer wheel of deliveries that wait for an ack, and of rejected messages
    redelivery_queue   spans that are to be sent again
    delivery_policy    ack timeout, backoff and limits of a position
    delivery_state     state of one position, as inquiries show it
    failure_reasons    reasons that consumers gave in nacks
    handover           attempts and delays that one position passes on to the next
    in_flight_bytes    bytes that a position has in flight

Imports `ring`, `protocol` and the leaf modules of `core`.
"""
