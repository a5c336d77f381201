package io.simplebus.client;

/**
 * Identity of a publisher in a Connect request.
 *
 * @param name name by which the bus recognizes messages that are sent again
 * @param instance a later connection with the same name and instance replaces this one
 * @param unconfirmed lowest unconfirmed message number; -1 in the first Connect of a run
 * @param memoryId memory id of the bus that the numbers belong to, or empty
 */
public record Publisher(String name, String instance, long unconfirmed, String memoryId) {}
