package io.simplebus.client;

import java.io.IOException;

/** The bus refused a request. The request had no effect, and the connection continues. */
public final class RefusedException extends IOException {
    private static final long serialVersionUID = 1;

    private final String code;

    RefusedException(String code, String sentence) {
        super(sentence);
        this.code = code;
    }

    /** Returns the reason code, such as {@code unknown_class}. */
    public String code() {
        return code;
    }
}
