"""Distributed tracing of a client.

    interface        `Tracing`, the spans around the operations of a client
    handler_errors   errors of handlers, also recorded in their spans
    class_names      names of the classes of published messages

Without tracing, a bus does not use this package. `TracedBus` and `TracedBlockingBus` are subclasses
of the buses.

May import: core, client, client.core.
"""
