"""Message memory of a class: whole wire frames in a chain of preallocated segments.

A ring grows by another segment, so stored frames are never copied and growth never stops the event
loop. Drained segments are reused, and freed when they were not needed for a while.

Modules in reading order:
    memory_budget   memory that all rings share, and array allocation
    columns         arrays with channel, expiry and delay of each message
    segment         one block of memory with frames of consecutive sequences
    ring            the chain of segments: append, read, release

Imports `protocol` and the leaf modules of `core`.
"""
