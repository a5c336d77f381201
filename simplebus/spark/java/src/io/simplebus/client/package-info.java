/**
 * Blocking client of the binary protocol, version 2: connections, requests and received messages.
 *
 * <p>It implements what the Spark connector needs of {@code protocol/binary.md} and uses Jackson for
 * JSON. It knows nothing about Spark. A connection belongs to one thread at a time.
 */
package io.simplebus.client;
