package io.simplebus.spark;

/** A subscribed class does not exist. */
public final class ClassMissingException extends IllegalArgumentException {
    private static final long serialVersionUID = 1;

    ClassMissingException(String sentence, Throwable cause) {
        super(sentence, cause);
    }
}
