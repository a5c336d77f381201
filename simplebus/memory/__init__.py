"""Bus inside the process: `MemoryBus`, for tests and for programs of one process.

    bus      `MemoryBus`, its broker and the transports of its clients
    journal  keeps the messages of a `MemoryBus` in a directory

The broker is that of the server and the client that of `connect`; only the socket is missing.

May import: core, net, client, and for `data_dir` also storage and server.journal.
"""
