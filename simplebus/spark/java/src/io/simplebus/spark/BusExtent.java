package io.simplebus.spark;

import java.util.Map;

/**
 * Stored messages of one bus.
 *
 * @param memoryId identity of the bus's data; a bus that lost its data has a new one
 * @param classes extents by class, in the order of the option {@code subscribe}
 */
record BusExtent(String memoryId, Map<String, ClassExtent> classes) {
    static final BusExtent EMPTY = new BusExtent("", Map.of());
}
