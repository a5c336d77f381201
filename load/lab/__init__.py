"""Experiments: what lost, and what bounds everything. Each runs by its path and prints its figures.

relay.py    a relay without a protocol: the physical limit, and the generator's own
scan.py     ways to find the frames in a read
batch.py    where arrays begin to beat a loop
"""
