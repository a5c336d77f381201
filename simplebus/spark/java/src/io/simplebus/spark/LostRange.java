package io.simplebus.spark;

/**
 * Messages {@code first..last-1} of a class that should be read but cannot be.
 *
 * @param last end of the range; {@link #UNKNOWN} if the number of lost messages is unknown
 */
record LostRange(String server, String className, long first, long last, String reason) {
    static final long UNKNOWN = -1;

    /** Returns the number of messages known to be lost. */
    long count() {
        return last == UNKNOWN ? 0 : last - first;
    }

    @Override
    public String toString() {
        return "messages " + first + (last == UNKNOWN ? " and on" : " to " + (last - 1)) + " of class "
                + className + " at " + server + " are lost: " + reason;
    }
}
