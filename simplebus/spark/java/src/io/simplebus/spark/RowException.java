package io.simplebus.spark;

/** A row that cannot be published. */
public final class RowException extends IllegalArgumentException {
    private static final long serialVersionUID = 1;

    RowException(String sentence) {
        super(sentence);
    }
}
