"""Copying messages from one bus to another, and to and from NATS servers.

channels   how channels are renamed on the way                                  pure
origin     where a message has been: the header that keeps rings from looping   pure
rewriting  frames as one bus sends them, as the other takes them                pure
progress   which numbers at the far end are which sequences here                pure
settings   what is copied from where to where                                   pure
"""
