package io.simplebus.spark;

import java.io.IOException;

/**
 * A batch or a write cannot be planned, because a bus of the option {@code servers} cannot be reached.
 *
 * <p>PySpark shows only the message of an IllegalArgumentException, and of others the Java stack too.
 */
public final class UnreachableException extends IllegalArgumentException {
    private static final long serialVersionUID = 1;

    UnreachableException(IOException cause) {
        super(cause.getMessage(), cause);
    }
}
