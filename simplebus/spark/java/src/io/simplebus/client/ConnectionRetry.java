package io.simplebus.client;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.time.Duration;
import java.util.concurrent.ThreadLocalRandom;

/** Connecting with retries: a short outage of a bus must not fail a task. */
public final class ConnectionRetry {
    private static final double DELAY_MIN_SECONDS = 0.05;

    /** Long enough for a bus to start, short enough to delay a task little. */
    private static final double DELAY_MAX_SECONDS = 1;

    private ConnectionRetry() {}

    /**
     * Connects; tries for some seconds, unless the error is permanent.
     *
     * @throws BusConnectionException the last error
     */
    public static BusConnection connect(
            BusAddress address, Credentials credentials, Publisher publisher, double seconds)
            throws IOException {
        long deadline = System.nanoTime() + (long) (seconds * 1e9);
        for (int turn = 0; ; turn++) {
            double remaining = Math.max((deadline - System.nanoTime()) / 1e9, DELAY_MIN_SECONDS);
            try {
                return BusConnection.connect(address, credentials, publisher, toDuration(remaining));
            } catch (BusConnectionException error) {
                double delay =
                        Math.min(DELAY_MIN_SECONDS * Math.pow(2, Math.min(turn, 10)), DELAY_MAX_SECONDS)
                                * (1 - ThreadLocalRandom.current().nextDouble() / 2);
                if (error.isPermanent() || delay >= (deadline - System.nanoTime()) / 1e9) {
                    throw error;
                }
                sleep(delay);
            }
        }
    }

    /** Returns a duration of at least a millisecond. */
    public static Duration toDuration(double seconds) {
        return Duration.ofMillis(Math.max(1, Math.round(seconds * 1000)));
    }

    /** Waits. Throws an exception if the thread is interrupted. */
    public static void sleep(double seconds) throws IOException {
        try {
            Thread.sleep(Math.round(seconds * 1000));
        } catch (InterruptedException error) {
            throw interrupted();
        }
    }

    /** Returns the exception for an interrupted thread, and interrupts the thread again. */
    static InterruptedIOException interrupted() {
        Thread.currentThread().interrupt();
        return new InterruptedIOException("interrupted while waiting for a bus");
    }
}
