package io.simplebus.spark;

import java.util.Map;

/**
 * Offsets of one server.
 *
 * @param memoryId memory id of the sequences; empty if unknown
 * @param classes next sequence to read, by class
 */
record ServerOffsets(String memoryId, Map<String, Long> classes) {
    static final ServerOffsets EMPTY = new ServerOffsets("", Map.of());

    /** Returns true if the memory ids are equal, or one is unknown. */
    static boolean isSameMemory(String one, String other) {
        return one.isEmpty() || other.isEmpty() || one.equals(other);
    }
}
