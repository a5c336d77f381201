"""The engine: bytes and beats in, bytes out. No I/O, no clock, no threads in here."""
