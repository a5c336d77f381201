"""Distributed tracing of a client.

    interface        `Tracing`, the spans around the operations of a client
    handler_errors   errors of handlers, also recorded in their spans
    class_names      names of the classes of published messages

Without tracing, a bus calls nothing of this. `TracedBus` and `TracedBlockingBus` are subclasses.

May import: core, client, client.core.
"""
