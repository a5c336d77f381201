"""`simplebus bench`: throughput and latency of the bus on this machine, with every byte verified.

    traffic      payloads, and the check of received frames; no I/O
    publisher    process that publishes in batches
    subscriber   process that verifies and acks in batches
    run          starts the server and the processes, and reports

It may import core, client, commands and console.
"""
