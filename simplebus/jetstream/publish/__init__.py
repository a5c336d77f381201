"""Publication of accepted messages to streams.

    codec               frames to JetStream messages and back
    class_queue         publish queue of one class: written, verified and stored messages
    stream_publisher    write batches to publications, PubAcks to durable positions
    refusals            log lines about streams that refuse messages

May import the modules of `jetstream` that do not import `publish`: `api`, `names` and
`settings`, and `core` and `logs`.
"""
