"""Clients: `bus` runs under trio and asyncio, `blocking` without any event loop. One core below."""
