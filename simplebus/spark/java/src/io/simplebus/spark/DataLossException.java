package io.simplebus.spark;

/** Messages that the query should read are lost. */
public final class DataLossException extends RuntimeException {
    private static final long serialVersionUID = 1;

    DataLossException(String sentence) {
        super(sentence);
    }
}
