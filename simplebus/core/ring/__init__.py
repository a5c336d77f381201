"""Message memory of a class: whole wire frames in a preallocated arena, with columns beside it.

Modules in reading order:
    memory_budget   memory that all rings share, and array allocation
    columns         arrays with channel, expiry and delay of each message
    ring            the arena: append, read, release, grow and shrink

Imports `protocol` and the leaf modules of `core`.
"""
