"""Store: everything about publishing.

- `store`: appends messages to classes, applies full-class policies, dead-letters and expires.
- `publish_queue`: messages of publishers that wait for space in a full class.
- `rate_queue`: publishers that wait for their rate limit.
- `refusal_sender`: tells sessions that a frame had no effect.
- `notifier`: tells subscriptions that their class has new messages.
- `drop_oldest`: drops the oldest messages of a full class to make space for new ones.
- `message_ids`: ids of the latest messages of NATS clients, for deduplication.
- `compaction`: copies last values to the head, so that older messages can be released.
- `publisher_confirms`: confirms and replies that wait for the journal.
- `quotas`: limits on the classes and durables that one user or address creates.
- `idle_classes`: removes unused classes.

May import everything of core except `broker`, `checkpoint` and `restore`.
"""
