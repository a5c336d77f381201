"""`simplebus demo`: a drill with real processes, and a verdict computed from what they wrote down.

    records    what is published, and what a subscriber notes of each receipt
    publisher  a process: publishes numbered messages
    subscriber a process: notes every receipt, then acknowledges it
    verdict    PURE: what was sent and noted in, verdict out
    display    the server's statistics as a live table or as plain lines
    drill      the server, the processes, the order of events

Rule 1: the verdict believes nothing but data: the publisher's count, the subscribers' notes, and
the position at which the server let each of them in.
"""
