package io.simplebus.spark;

/**
 * Range of sequences that a class stores: {@code floor <= sequence < head}.
 *
 * @param floor lowest stored sequence
 * @param head sequence of the next message
 */
record ClassExtent(long floor, long head) {}
