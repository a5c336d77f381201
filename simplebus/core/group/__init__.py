"""Queue groups: several subscriptions share one position, and each message goes to one of them.

Modules in reading order:
    group                a group and its members
    least_loaded         selection of the member with the fewest messages in flight
    key_ordered_group    a group that keeps the order of messages with the same key, and its members
    key_assignment       assignment of partitions to members (rendezvous hashing)
    key_hash             the partition of a message, computed from its key
    partition_queues     order of messages within each partition
    keys_in_flight       messages in flight to one member

Imports `subscription`, `redelivery`, `ring`, `protocol` and the leaf modules of `core`.
"""
