package io.simplebus.client;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;

/**
 * Receiver of what the bus sends to a publisher: Confirms, refusals and replies.
 *
 * <p>It reads in a thread of its own, so that the publisher can write meanwhile, and closes the
 * connection when it is lost, so that a blocked write ends.
 */
final class PublishReceiver {
    private static final long FAILURE_MILLISECONDS = 1000;

    private final BusConnection connection;
    private int nextNumber;
    private ServerFrame refusal;
    private ServerFrame reply;
    private BusConnectionException failure;

    /** @param nextNumber message number that the bus expects next */
    PublishReceiver(BusConnection connection, int nextNumber) {
        this.connection = connection;
        this.nextNumber = nextNumber;
    }

    void start() {
        Thread thread = new Thread(this::receiveAll, "simplebus receiver");
        thread.setDaemon(true);
        thread.start();
    }

    private void receiveAll() {
        try {
            while (true) {
                handle(connection.receive());
            }
        } catch (BusConnectionException error) {
            connection.abort();
            fail(error);
        }
    }

    private synchronized void handle(ServerFrame frame) {
        if (frame.type() == Frames.CONFIRM) {
            int advance = frame.number() - nextNumber & BusPublisher.NUMBER_MASK;
            nextNumber = advance < BusPublisher.HALF_NUMBER_RANGE ? frame.number() : nextNumber;
        } else if (frame.type() == Frames.CONNECT || frame.concerns() == Frames.CONNECT) {
            reply = frame;
        } else if (frame.type() == Frames.ERROR && refusal == null && frame.concerns() != 0) {
            refusal = frame;
        }
        notifyAll();
    }

    private synchronized void fail(BusConnectionException error) {
        failure = error;
        notifyAll();
    }

    /** Returns the number of the first message that is not confirmed. */
    synchronized int nextNumber() {
        return nextNumber;
    }

    /** Returns the Error about the first refused message; null for none. */
    synchronized ServerFrame refusal() {
        return refusal;
    }

    /** Waits until {@link #nextNumber} differs from a number. */
    synchronized void awaitConfirm(int number) throws IOException {
        while (nextNumber == number) {
            awaitChange();
        }
    }

    /**
     * Waits for the reply to a Connect request. At most one is open.
     *
     * @throws RefusedException if the bus refused the request
     */
    synchronized JsonNode awaitReply(int request) throws IOException {
        while (reply == null || reply.number() != request) {
            awaitChange();
        }
        if (reply.type() == Frames.ERROR) {
            throw new RefusedException(
                    reply.content().path("code").asText(), reply.content().path("message").asText());
        }
        return reply.content();
    }

    private void awaitChange() throws IOException {
        if (failure != null) {
            throw failure;
        }
        try {
            wait();
        } catch (InterruptedException error) {
            throw ConnectionRetry.interrupted();
        }
    }

    /**
     * Returns the reason of a loss that a write has noticed: what the bus sent last, if it comes soon.
     *
     * @param error the error of the write
     */
    synchronized BusConnectionException reasonOf(BusConnectionException error) throws IOException {
        long deadline = System.nanoTime() + FAILURE_MILLISECONDS * 1_000_000;
        while (failure == null && System.nanoTime() < deadline) {
            try {
                wait(1 + (deadline - System.nanoTime()) / 1_000_000);
            } catch (InterruptedException interruption) {
                throw ConnectionRetry.interrupted();
            }
        }
        return failure == null ? error : failure;
    }
}
