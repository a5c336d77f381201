"""Experiments with slower alternatives, and physical limits. Run each by its path.

relay.py              relay without a protocol: the physical limit, and the generator's own
frame_scanning.py     ways to find frame boundaries in a read
header_parsing.py     smallest batch for which arrays beat a loop
nats_msg_encoding.py  ways to write MSG lines from PUB lines
"""
