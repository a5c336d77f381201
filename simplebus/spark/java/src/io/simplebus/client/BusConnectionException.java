package io.simplebus.client;

import java.io.IOException;

/** The connection to a bus could not be opened, or is lost. */
public final class BusConnectionException extends IOException {
    private static final long serialVersionUID = 1;

    private final boolean isPermanent;

    /**
     * @param sentence what happened, what was expected, and what to do
     * @param isPermanent true if another attempt would fail, too
     */
    public BusConnectionException(String sentence, boolean isPermanent, Throwable cause) {
        super(sentence, cause);
        this.isPermanent = isPermanent;
    }

    /** Returns true if another attempt to connect would fail, too. */
    public boolean isPermanent() {
        return isPermanent;
    }
}
