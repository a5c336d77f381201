package io.simplebus.spark;

import java.io.Serializable;

/**
 * Messages {@code first..last-1} of a class, to be read by one task.
 *
 * @param memoryId memory id of the sequences
 */
record MessageRange(String server, String memoryId, String className, long first, long last)
        implements Serializable {
    long count() {
        return last - first;
    }

    @Override
    public String toString() {
        return "messages " + first + " to " + (last - 1) + " of class " + className + " at " + server;
    }
}
