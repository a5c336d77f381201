package io.simplebus.spark;

import java.util.Arrays;

/** Slices of a byte array, one for each message. An empty slice stands for an absent field. */
final class Slices {
    int[] begins;
    int[] ends;

    Slices(int capacity) {
        begins = new int[capacity];
        ends = new int[capacity];
    }

    void set(int row, int begin, int end) {
        begins[row] = begin;
        ends[row] = end;
    }

    /** Moves a slice to an earlier row. */
    void move(int from, int to) {
        begins[to] = begins[from];
        ends[to] = ends[from];
    }

    void clear(int from, int to) {
        Arrays.fill(begins, from, to, 0);
        Arrays.fill(ends, from, to, 0);
    }

    boolean isEmpty(int row) {
        return begins[row] == ends[row];
    }

    void grow(int capacity) {
        begins = Arrays.copyOf(begins, capacity);
        ends = Arrays.copyOf(ends, capacity);
    }
}
