"""Decoder of message frames that a journal stores, as batches for a ring."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simplebus.core.limits import RECEIVE_BYTES, STORED_HEADERS_MAX
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.ring.columns import MessageRows, Times
from simplebus.core.subscription.channel_filter import ChannelTable


class StoredFrameReader:
    """Reads stored frames; the buffers of one reader serve all classes."""

    def __init__(self) -> None:
        self._scratch_bytes = RECEIVE_BYTES
        self._scratch: SplitterScratch | None = None

    def split_frames(self, buffer: bytearray, begin: int, end: int, count: int) -> list[FrameBatch]:
        """Return the frames in `buffer[begin:end]`.

        `buffer` must have RECEIVE_PADDING_BYTES after `end`.

        Raises:
            ValueError: The bytes are not exactly `count` frames.
        """
        if self._scratch is None or end - begin > self._scratch_bytes:
            self._scratch_bytes = max(self._scratch_bytes, 1 << (end - begin).bit_length())
            self._scratch = SplitterScratch(self._scratch_bytes)
        batches = []
        while begin < end:
            batch = split_frames(buffer, begin, end, self._scratch)
            if batch is None:
                raise ValueError(f"{end - begin} bytes after the last frame are not a frame")
            batches.append(batch)
            begin += batch.data.size
            count -= batch.count
        if count:
            raise ValueError(f"{abs(count)} frames are {'missing' if count > 0 else 'too many'}")
        return batches

    def iter_runs(
        self, channels: ChannelTable, batch: FrameBatch, accepted_times: float | Times
    ) -> Iterator[tuple[FrameBatch, MessageRows | None]]:
        """Yield runs of frames of one type, and the column values of envelopes.

        The caller must append each run before it requests the next one.

        Args:
            channels: Channels of the class of the messages.
            batch: Stored frames.
            accepted_times: Unix time at which all, or each, of the frames were accepted.

        Raises:
            ValueError: A frame is not a valid message.
            MemoryError: There is no memory for the channels.
        """
        types = batch.data[batch.starts]
        breaks = np.flatnonzero(types[1:] != types[:-1]) + 1
        bounds = [0, *breaks.tolist(), batch.count]
        for begin, end in pairwise(bounds):
            run, rows = batch.slice(begin, end), None
            if run.data[0] == frames.ENVELOPE:
                read = envelope_batch.scan_envelopes(run, headers_max=STORED_HEADERS_MAX)
                if read.count < run.count:
                    raise ValueError("an envelope cannot be read")
                run_times = (
                    accepted_times
                    if isinstance(accepted_times, float)
                    else accepted_times[begin:end]
                )
                rows = channels.build_rows(read, run_times)
                if rows is None:
                    raise MemoryError("there is no memory for channels")
            elif run.data[0] != frames.MESSAGE:
                raise ValueError(f"a frame of type {run.data[0]} is not a message")
            yield run, rows
