package io.simplebus.client;

import java.util.Arrays;

/**
 * Frames of consecutive messages of a publisher, kept until they are confirmed.
 *
 * <p>A position counts the messages of the publisher from 0; the message number is its low 31 bits.
 */
final class PublishBlock {
    private final long first;
    private byte[] bytes;
    private int size;
    private long end;
    private int sentBytes;
    private long sentEnd;

    /**
     * @param bytes buffer, which may be replaced by a larger one
     * @param first position of the first message
     */
    PublishBlock(byte[] bytes, long first) {
        this.bytes = bytes;
        this.first = first;
        this.end = first;
        this.sentEnd = first;
    }

    byte[] bytes() {
        return bytes;
    }

    int size() {
        return size;
    }

    /** Returns the position behind the last message. */
    long end() {
        return end;
    }

    /** Returns the index of the first byte that was not sent on this connection. */
    int sentBytes() {
        return sentBytes;
    }

    /** Returns the position of the first message that was not sent on this connection. */
    long sentEnd() {
        return sentEnd;
    }

    boolean isSent() {
        return sentBytes == size;
    }

    /**
     * Appends a message.
     *
     * @param prefix see {@link EnvelopePrefix}; null for none
     * @param frameBytesMax longest frame that the bus accepts
     * @throws IllegalArgumentException if the frame is longer
     */
    void append(int classId, byte[] prefix, byte[] payload, int frameBytesMax) {
        int prefixLength = prefix == null ? 0 : prefix.length;
        ensureFree(Frames.HEADER_BYTES + 1L + prefixLength + payload.length);
        int begin = size + Frames.HEADER_BYTES;
        byte type = Frames.MESSAGE;
        int contentEnd = begin;
        if (prefix != null) {
            type = Frames.ENVELOPE;
            System.arraycopy(prefix, 0, bytes, begin, prefixLength);
            contentEnd += prefixLength;
        }
        System.arraycopy(payload, 0, bytes, contentEnd, payload.length);
        contentEnd += payload.length;
        if (prefix == null && Frames.indexOfDelimiter(bytes, begin, contentEnd) >= 0) {
            type = Frames.ENVELOPE;
            bytes[begin] = 0; // No fields.
            System.arraycopy(payload, 0, bytes, begin + 1, payload.length);
            contentEnd++;
        }
        if (type == Frames.ENVELOPE) {
            contentEnd = stuff(begin, contentEnd);
        }
        int contentLength = contentEnd - begin;
        if (contentLength > frameBytesMax - Frames.HEADER_BYTES - Frames.DELIMITER_BYTES) {
            throw tooLongError(payload.length, contentLength, frameBytesMax);
        }
        ensureFree((long) contentEnd - size + Frames.DELIMITER_BYTES);
        Frames.writeHeader(bytes, size, type, classId, (int) end & BusPublisher.NUMBER_MASK, 0);
        Frames.writeDelimiter(bytes, contentEnd);
        size = contentEnd + Frames.DELIMITER_BYTES;
        end++;
    }

    /** Inserts a NUL behind every {@code <}, CR, LF of a content. Returns its new end. */
    private int stuff(int begin, int contentEnd) {
        if (indexOfStuffing(bytes, begin, contentEnd) < 0) {
            return contentEnd;
        }
        byte[] content = Arrays.copyOfRange(bytes, begin, contentEnd);
        ensureFree((long) begin - size + 2L * content.length); // A NUL for each third byte, at most.
        int from = 0;
        int to = begin;
        for (int next = indexOfStuffing(content, 0, content.length);
                next >= 0;
                next = indexOfStuffing(content, from, content.length)) {
            System.arraycopy(content, from, bytes, to, next - from);
            to += next - from;
            from = next;
            bytes[to++] = 0;
        }
        System.arraycopy(content, from, bytes, to, content.length - from);
        return to + content.length - from;
    }

    /** Returns the index behind the first {@code <}, CR, LF; -1 if there is none. */
    private static int indexOfStuffing(byte[] bytes, int from, int end) {
        for (int at = from + 2; at < end; at++) {
            if (bytes[at] == '\n' && bytes[at - 1] == '\r' && bytes[at - 2] == '<') {
                return at + 1;
            }
        }
        return -1;
    }

    private static IllegalArgumentException tooLongError(
            int payloadLength, int contentLength, int frameBytesMax) {
        String envelope =
                contentLength == payloadLength ? "" : " (" + contentLength + " with its envelope)";
        return new IllegalArgumentException(
                "the payload has " + payloadLength + " bytes" + envelope + "; a message of this "
                        + "connection carries at most "
                        + (frameBytesMax - Frames.HEADER_BYTES - Frames.DELIMITER_BYTES));
    }

    private void ensureFree(long count) {
        if (size + count > bytes.length) {
            bytes = Arrays.copyOf(bytes, Math.toIntExact(Math.max(2L * bytes.length, size + count)));
        }
    }

    /** Prepares the messages from a position on to be sent again. */
    void rewind(long position) {
        sentBytes = 0;
        sentEnd = first;
        while (sentEnd < position) {
            markSent(frameEnd(sentBytes), 1);
        }
    }

    /**
     * Returns the end of the unsent frames that have at most so many bytes together.
     *
     * @param isOneAllowed true to return the end of at least one frame
     */
    int endWithin(long availableBytes, boolean isOneAllowed) {
        if (size - sentBytes <= availableBytes) {
            return size;
        }
        int found = isOneAllowed ? frameEnd(sentBytes) : sentBytes;
        for (int next = found; next < size && next - sentBytes <= availableBytes; ) {
            found = next;
            next = frameEnd(next);
        }
        return found;
    }

    /** Notes that the bytes before an index are sent. */
    void markSentTo(int index) {
        if (index == size) {
            sentBytes = size;
            sentEnd = end;
        }
        while (sentBytes < index) {
            markSent(frameEnd(sentBytes), 1);
        }
    }

    private void markSent(int index, int count) {
        sentBytes = index;
        sentEnd += count;
    }

    private int frameEnd(int begin) {
        return Frames.indexOfDelimiter(bytes, begin + Frames.HEADER_BYTES, size)
                + Frames.DELIMITER_BYTES;
    }
}
