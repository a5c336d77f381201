package io.simplebus.spark;

/**
 * Decision when the next micro-batch is due: by waiting messages and maximum delay. The current time is
 * an argument, in seconds.
 */
final class BatchTrigger {
    private final Long minMessages;
    private final double maxDelaySeconds;
    private double lastDue = Double.NEGATIVE_INFINITY;

    /** @param minMessages number of messages that a batch waits for; null for none */
    BatchTrigger(Long minMessages, double maxDelaySeconds) {
        this.minMessages = minMessages;
        this.maxDelaySeconds = maxDelaySeconds;
    }

    /**
     * Returns true if enough messages wait, or have waited for the maximum delay. After a true result
     * the delay starts again, so the caller must start the batch. The first batch is due at once.
     */
    boolean isDue(long waiting, double now) {
        if (minMessages != null && waiting < minMessages && now < lastDue + maxDelaySeconds) {
            return false;
        }
        lastDue = now;
        return true;
    }
}
