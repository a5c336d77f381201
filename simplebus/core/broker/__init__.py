"""Broker: applies the events of all sessions to the store, and answers their requests.

- `broker`: the facade that a driver calls.
- `subscription_manager`: Connect, Subscribe and Unsubscribe requests, and the ends of positions.
- `subscribe_options`: validation of a Subscribe request, and its delivery policy.
- `acknowledge`: acks, nacks, working and terminate.
- `fetch`: Fetch and Purge requests.
- `inquire`, `inquire_positions`, `inquire_channels`: Inquire requests.
- `wait_reasons`: explains what a position waits for.
- `class_warnings`: finds classes that have publishers or subscribers only.

Calls for one confirmed message of version 2. A read of few frames takes this path:

    Broker.receive                        a driver has read bytes into the receive buffer
      Session.receive_few                 finds the frames
        Version2Decoder.decode_single     checks the message number, returns `PublishedFrame`
      Store.publish_one                   permission, rate limit, full-class policy
        Ring.append_one                   copies the frame, writes id and timer index
        log_stored_messages               with a journal only
        Store.notify_subscribers
          Outbox.enqueue                  lists the session of each subscriber as ready
      PublisherConfirms.confirm_stored    queues the Confirm, or waits for the journal
    Broker.end_turn                       returns the sessions to flush, close and resume
    Outbox.peek                           for each session to flush: Confirm and messages, joined
      BrokerSubscription.peek_frames      a view of the ring, behind a Deliver frame if needed
    Outbox.mark_sent                      after the write: moves the cursor, starts the ack timeout

Calls for a batch of version 1. A read of more frames takes this path, on arrays:

    Broker.receive
      Session.receive
        FrameReceiver.receive             keeps the incomplete frame for the next read
          split_frames                    finds the bounds of all frames at once
        Version1Decoder.decode_events     returns one `PublishedBatch` per class
      Store.publish                       permission, rate limit, full-class policy
        Store.append_batch                makes space if the class can evict messages
          Store.append_and_log
            Ring.append                   copies the frames, writes ids and timer indexes
            log_stored_messages           with a journal only
          Store.notify_subscribers
    Broker.end_turn
    Outbox.peek                           a view of as many frames as one write takes
    Outbox.mark_sent

A version 1 session never enters `PublisherConfirms`. A batch of version 2 does, after its last
event, as a single message does.

The third path, of a message on a bound NATS subject, is described in `simplebus.nats.bus`.

May import everything of core except `checkpoint` and `restore`.
"""
