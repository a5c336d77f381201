"""Protocol state machine of a client, shared by all drivers and MemoryBus.

Pure: no I/O and no clock; time is an argument. Modules in reading order:

    client           ClientCore, the facade that a driver uses
    connection       handshake, reconnect, requests and replies
    open_requests    requests that wait for a reply
    class_names      classes that were named to the server
    heartbeat        keepalive timer
    publish_buffer   published messages until they are confirmed
    publish_batch    numbered frame batches
    send_queue       bytes to send: acks, requests, published messages
    frame_runs       splits received frames into runs
    inboxes          routes runs to the inbox of their subscription
    inbox            received messages of one subscription, and how far they are settled
    messages         Message and Batch
    acks             acks, nacks and working notices
    statistics       ClientStatistics
    arguments        checks of public arguments

May import only `simplebus.core`.
"""
