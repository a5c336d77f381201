"""Positions and subscriptions: delivery state per consumer, and the messages to send next.

Modules in reading order:
    position                delivery state of one consumer: cursor, ack window, next messages
    unacked_messages        messages behind the cursor: in flight, delayed, or to be sent again
    subscription            attachment of a session to a position; sends its messages
    selection               which stored messages are sent, and in which form
    copied_frames           frames that are copied to be sent with one write
    channel_filter          channels of a class and the filters of its subscriptions
    backlog                 number of messages ahead of a cursor that match a filter
    pending_dead_letters    messages given up whose dead letters are not stored yet
    delayed_wakeups         wakeups of positions at a time

Imports `redelivery`, `ring`, `protocol`, `channel`, `users` and the leaf modules of `core`.
"""
