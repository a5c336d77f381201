package io.simplebus.client;

/** Receiver of the messages that precede the reply to a Fetch. */
@FunctionalInterface
public interface MessageReceiver {
    /**
     * Accepts one message. Its bytes stay in place until the next request.
     *
     * @param bytes the receive buffer; a later call may pass a longer copy of it
     * @param isEnvelope true if the content is an envelope
     * @param begin index of the first byte of the content
     * @param end index behind its last byte
     */
    void add(byte[] bytes, boolean isEnvelope, int begin, int end);
}
