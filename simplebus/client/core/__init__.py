"""One program's side of the conversation with a bus: what both clients and MemoryBus drive."""
