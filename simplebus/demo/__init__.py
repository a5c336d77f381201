"""`simplebus demo`: a scenario with real processes, and a verdict computed from their records.

    records      payloads, and receipts written by subscribers
    publisher    process that publishes numbered messages
    subscriber   process that records every message, then acks it
    verdict      comparison of published and received messages; no I/O
    display      the server's statistics as a live table or as plain lines
    scenario     the server, the processes and the order of events

The verdict uses recorded data only: the publisher's counts, the subscribers' receipts, and the
server's cursor at each subscription. It may import core, client, server and console.
"""
