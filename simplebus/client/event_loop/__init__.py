"""Event loop of a bus, under trio and asyncio.

anyio detects the event loop in every call. A bus detects it once, and then uses the cheapest
services of that loop.

    services      `EventLoop`: clock, waiters and readable sockets
    asyncio_loop  its implementation for asyncio
    trio_loop     its implementation for trio
    find          finds the event loop of the current task
    wakeup_event  wakes tasks that wait for a change
    deadlines     deadlines of many waits, with one timer

May import: nothing of simplebus.
"""
