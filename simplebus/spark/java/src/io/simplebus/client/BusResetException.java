package io.simplebus.client;

import java.io.IOException;

/** The bus lost messages that it had confirmed to this publisher. */
public final class BusResetException extends IOException {
    private static final long serialVersionUID = 1;

    BusResetException(String sentence) {
        super(sentence);
    }
}
