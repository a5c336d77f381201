package io.simplebus.client;

import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.util.Arrays;

/**
 * Buffer of received bytes, split into frames.
 *
 * <p>Frames keep their place until {@link #compact}, so that messages of a reply are read where they
 * were received. The buffer grows to the size of one reply and of one frame.
 */
final class ReceiveBuffer {
    /** A reply to a Fetch has about 1 MiB; the next one begins in the same buffer. */
    private static final int INITIAL_BYTES = 1 << 16;

    private static final int FREE_BYTES_MIN = 1 << 15;
    private static final int BYTES_MAX = 1 << 30;

    private final InputStream input;
    private byte[] bytes = new byte[INITIAL_BYTES];
    private int begin;
    private int end;
    private long receivedBytes;

    ReceiveBuffer(InputStream input) {
        this.input = input;
    }

    byte[] bytes() {
        return bytes;
    }

    /** Returns the number of bytes received so far. */
    long receivedBytes() {
        return receivedBytes;
    }

    /** Moves the unread bytes to the start. Earlier frames are lost. */
    void compact() {
        System.arraycopy(bytes, begin, bytes, 0, end - begin);
        end -= begin;
        begin = 0;
    }

    /**
     * Receives until a whole frame is there, and steps behind it.
     *
     * @return the index of the frame's first byte; its end is {@link #nextFrame}
     * @throws EOFException if the bus closed the connection
     */
    int readFrame() throws IOException {
        int searched = begin + Frames.HEADER_BYTES;
        while (true) {
            int delimiter = Frames.indexOfDelimiter(bytes, searched, end);
            if (delimiter >= 0) {
                int first = begin;
                begin = delimiter + Frames.DELIMITER_BYTES;
                return first;
            }
            searched = Math.max(searched, end - Frames.DELIMITER_BYTES + 1);
            receive();
        }
    }

    /** Returns the index of the next frame, which is the end of the one read last. */
    int nextFrame() {
        return begin;
    }

    private void receive() throws IOException {
        if (bytes.length - end < FREE_BYTES_MIN) {
            if (bytes.length >= BYTES_MAX) {
                throw new IOException("a reply of the bus exceeds " + BYTES_MAX + " bytes");
            }
            bytes = Arrays.copyOf(bytes, 2 * bytes.length);
        }
        int count = input.read(bytes, end, bytes.length - end);
        if (count < 0) {
            throw new EOFException();
        }
        end += count;
        receivedBytes += count;
    }
}
