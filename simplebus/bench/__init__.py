"""`simplebus bench`: how fast the bus is on this machine. No rate without a check of every byte.

    traffic    PURE: what is published, and the check of what arrives
    publisher  a process: publishes in batches
    subscriber a process: checks and acknowledges in batches
    run        the server, the processes, the progress bar, the report

Rule 1: the report says what shared the machine's cores.
"""
