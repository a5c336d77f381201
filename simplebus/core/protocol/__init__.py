"""Binary protocol on the wire: frames, envelopes and JSON bodies, without sessions or sockets.

Modules in reading order (protocol/binary.md has the specification):
    frames            frame layout, batches of frames, ack ranges
    frame_splitter    search for frame bounds in received bytes
    receive_buffer    received bytes of a connection, split into frames
    envelope          content of one Envelope frame: channel, key, headers, times
    envelope_batch    columns of many envelopes
    request_envelope  envelopes that end with the header `request-id`
    envelope_reader   array reader for envelopes with the same fields, used by `envelope_batch`
    durability        durability levels
    requests          JSON bodies of requests and replies
    opening           recognizes other protocols by their first bytes
    inquiry           JSON bodies of Inquire requests and their replies
    events            what a decoder returns for received frames

Imports `channel` and the leaf modules of `core`.
"""
