"""Limits and fair scheduling for connections that are not authenticated yet.

- `queue`: `PreAuthQueue` gives them the event loop one at a time, in turn per address
- `greeting`: `GreetingBuffers` bounds the memory for their first messages
- `auth_worker`: `AuthWorker` checks credentials, slow password hashes in a thread
- `address_limits`: connections and connection rate per address
- `eviction`: `EvictableConnections` are closed for newer ones when a listener is full
- `closing`: `ClosingConnections` bounds the sockets of refused clients

May import: core and logs.
"""
