/**
 * Blocking client of the binary protocol, version 2: connections, requests, received and published
 * messages.
 *
 * <p>It implements what the Spark connector needs of {@code protocol/binary.md} and uses Jackson for
 * JSON. It is independent of Spark. One thread at a time sends on a connection, and one
 * receives.
 */
package io.simplebus.client;
