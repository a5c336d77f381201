package io.simplebus.client;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * Received frame that is neither a message nor a fatal Error.
 *
 * @param type frame type, of {@link Frames}
 * @param number field B: number of a request or message
 * @param concerns field C: of an Error, the type of the refused frame
 * @param content JSON content; empty if there is none
 */
record ServerFrame(byte type, int number, int concerns, JsonNode content) {}
