"""Connection between NATS clients and the classes of the broker.

Reading order:
    bus_adapter      `BusAdapter`: local sessions of NATS clients, acked subscriptions, acks
    bindings         messages on bound subjects are stored in classes
    publish_acks     PubAcks: replies to stored and refused messages, in the form of JetStream
    durable_replies  PubAcks and PONGs that wait for the journal
    convert          NATS messages to envelopes and back
    bus_to_nats      messages of binary clients are delivered to NATS subscriptions
    delayed_ranges   delayed messages of binary clients, by due time
    acked            acked subscriptions: parsing `$SB.SUB.` subjects, deliveries, ack payloads

Calls for one PUB on a bound subject. The frame is built once, and nothing decodes it on the way:

    server  Connection.run                     reads the client's bytes
              NatsListener.receive             sets the clock
    nats        NatsServer.receive
                  NatsParser.receive           returns the message
                  NatsServer._publish          checks the client's permission for the subject
                    SubjectRoutes.match        returns the cached sinks of the subject
                    SubjectBinding.deliver
                      MessageConverter.convert_message   returns channel and frame
    core              Broker.publish_encoded
                        Store.publish_one      makes the row of the channel; checks permission for
                                               the class, rate limit and full-class policy
                          Ring.append_one
                          log_stored_messages  with a journal only
                          Store.notify_subscribers
    server      Server.flush_ready             sends to subscribers, submits to the journal

Many messages of one read take `SubjectBinding.deliver_batch`, `Broker.apply_event` and
`Store.publish`, which gets the channels as `EnvelopeColumns`.

May import `core`, the modules of `nats` except `nats_server`, `nats.protocol` and `nats.server`.
"""
