"""Broker core: the bus as a state machine. Bytes, ticks and clock readings go in, bytes come out.

Nothing here does I/O, reads a clock, starts a thread, logs or uses async. The core imports nothing
of simplebus outside this package. A driver, such as `simplebus.server`, owns sockets and timers.

Sub-packages and modules, lowest layer first. Each imports only those above it:

    errors, limits, clock     exceptions and reason codes; bounds; the time that the driver sets
    histogram, toml           duration histograms; TOML parser for untrusted text
    steps                     helpers for long work that is cut into steps
    channel                   channel names, patterns, and indexes that match them
    settings                  settings of a broker and of its classes
    protocol                  frames, envelopes, JSON bodies: encoding and decoding
    users                     users, permissions, passwords, rate limits
    ring                      the ring of a class and the memory budget of all rings
    producer_state            stored message numbers of each publisher, for deduplication
    dead_letters              messages that a position gave up, as messages of another class
    statistics                immutable counters of a broker, its classes and subscriptions
    redelivery                ack windows, ack timers, backoff, delivery counts
    outbox                    bytes and positions that a session has to send
    subscription              positions and subscriptions: selecting and sending messages
    group                     groups, and key-ordered groups, that share a position
    session                   protocol state of one peer, versions 1 and 2
    commit_log                changes that wait to be written to the journal
    snapshot                  records of the state that outlives the process
    message_class             a class: ring, positions, last values, spilling, remote storage
    authorization             permissions of a session for classes, channels and durables
    store                     publishing: full-class policies, publish queue, confirms, quotas
    broker                    the broker: dispatches events of sessions; requests and acks
    checkpoint, restore       a broker's state to snapshot records, and back

Start with `broker.broker.Broker`, then `store.store.Store` and `message_class.message_class`.
"""
