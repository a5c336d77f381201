package io.simplebus.spark;

/** Invalid offsets. The text names server and class, the value and the expected one. */
public final class OffsetException extends IllegalArgumentException {
    private static final long serialVersionUID = 1;

    OffsetException(String sentence) {
        super(sentence);
    }
}
