"""Protocol state of one peer: received bytes become events.

Modules in reading order:
    session           one connection's state, from accept to close
    version1          decoder of protocol version 1
    version2          decoder of protocol version 2
    turn_budget       limits of the work that one turn does for one read
    admission         authentication of the first frame, connections per user
    rate_limits       publish rates per user and address
    pending_limits    limits on the bytes held for sessions

Imports `users`, `protocol` and the leaf modules of `core`.
"""
