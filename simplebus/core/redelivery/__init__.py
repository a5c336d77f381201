"""Delivery state of positions: acknowledgements, redelivery timers, delays and failure reasons.

Modules in reading order:
    sequence_set       sets of sequences, stored as ranges
    ack_window         sequences that a position has acknowledged
    ack_timer          timer wheel of deliveries that wait for an ack
    delivery_policy    ack timeout, backoff and limits of a position
    delivery_state     state of one position, as inquiries show it
    failure_reasons    reasons that consumers gave in nacks
    handover           attempts and delays that one position passes on to the next
    in_flight_bytes    bytes that a position has in flight

Imports `ring`, `protocol` and the leaf modules of `core`.
"""
