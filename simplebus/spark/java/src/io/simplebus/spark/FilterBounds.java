package io.simplebus.spark;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.Predicate;

/**
 * Bounds of offsets, classes, servers, channels and timestamps from pushed-down filters.
 *
 * <p>Spark applies all filters again, so too wide bounds are slow but correct. Timestamps select rows
 * within tasks only: they come from publishers' clocks and may be out of order.
 */
final class FilterBounds {
    private long first;
    private long last = Long.MAX_VALUE;
    private Set<String> classes;
    private Set<String> servers;
    private Set<String> channels;
    private long timestampMin = Long.MIN_VALUE;
    private long timestampMax = Long.MAX_VALUE;
    private final List<Predicate> used = new ArrayList<>();

    FilterBounds(Predicate[] predicates) {
        for (Predicate one : predicates) {
            if (add(one)) {
                used.add(one);
            }
        }
    }

    /** Returns the filters that narrow the read. */
    Predicate[] used() {
        return used.toArray(new Predicate[0]);
    }

    RowFilter rowFilter(List<ChannelPattern> patterns, long limit) {
        return new RowFilter(patterns, channels, timestampMin, timestampMax, limit);
    }

    private boolean add(Predicate one) {
        Expression[] children = one.children();
        if (one.name().equals("AND")) {
            boolean isLeftUsed = add((Predicate) children[0]);
            return add((Predicate) children[1]) || isLeftUsed;
        }
        if (children.length < 2) {
            return false;
        }
        boolean isReversed = children[0] instanceof Literal && children.length == 2;
        Expression column = children[isReversed ? 1 : 0];
        if (!(column instanceof NamedReference reference) || reference.fieldNames().length != 1) {
            return false;
        }
        List<Object> values = new ArrayList<>();
        for (Expression child : children) {
            if (child instanceof Literal<?> literal && literal.value() != null) {
                values.add(literal.value());
            } else if (child != column && !(child instanceof Literal)) {
                return false;
            }
        }
        String operator = isReversed ? reverse(one.name()) : one.name();
        return narrow(reference.fieldNames()[0], operator, values);
    }

    private static String reverse(String operator) {
        return switch (operator) {
            case ">" -> "<";
            case ">=" -> "<=";
            case "<" -> ">";
            case "<=" -> ">=";
            default -> operator;
        };
    }

    private boolean narrow(String column, String operator, List<Object> values) {
        if (values.isEmpty()) {
            return false;
        }
        switch (column) {
            case "offset":
                return narrowOffsets(operator, values);
            case "timestamp":
                return narrowTimestamps(operator, values);
            case "topic", "server", "channel":
                if (!Set.of("=", "<=>", "IN").contains(operator)) {
                    return false;
                }
                Set<String> texts = new HashSet<>();
                values.forEach(value -> texts.add(value.toString()));
                if (column.equals("topic")) {
                    classes = intersect(classes, texts);
                } else if (column.equals("server")) {
                    servers = intersect(servers, texts);
                } else {
                    channels = intersect(channels, texts);
                }
                return true;
            default:
                return false;
        }
    }

    private static Set<String> intersect(Set<String> one, Set<String> other) {
        if (one != null) {
            other.retainAll(one);
        }
        return other;
    }

    private boolean narrowOffsets(String operator, List<Object> values) {
        long[] bounds = bounds(operator, values);
        if (bounds == null) {
            return false;
        }
        first = Math.max(first, bounds[0]);
        last = Math.max(0, Math.min(last, bounds[1] == Long.MAX_VALUE ? bounds[1] : bounds[1] + 1));
        return true;
    }

    private boolean narrowTimestamps(String operator, List<Object> values) {
        long[] bounds = bounds(operator, values);
        if (bounds == null) {
            return false;
        }
        timestampMin = Math.max(timestampMin, bounds[0]);
        timestampMax = Math.min(timestampMax, bounds[1]);
        return true;
    }

    /** Returns the lowest and the highest number that a filter selects; null if it has none. */
    private static long[] bounds(String operator, List<Object> values) {
        long low = Long.MAX_VALUE;
        long high = Long.MIN_VALUE;
        for (Object value : values) {
            if (!(value instanceof Number number) || value instanceof Double || value instanceof Float) {
                return null;
            }
            low = Math.min(low, number.longValue());
            high = Math.max(high, number.longValue());
        }
        return switch (operator) {
            case ">" -> new long[] {low == Long.MAX_VALUE ? low : low + 1, Long.MAX_VALUE};
            case ">=" -> new long[] {low, Long.MAX_VALUE};
            case "<" -> new long[] {Long.MIN_VALUE, high == Long.MIN_VALUE ? high : high - 1};
            case "<=" -> new long[] {Long.MIN_VALUE, high};
            case "=", "<=>", "IN" -> new long[] {low, high};
            default -> null;
        };
    }

    /** Start and end of a read. */
    record Span(Map<String, ServerOffsets> start, Map<String, ServerOffsets> end) {}

    /** Narrows a range to these bounds. */
    Span narrow(Map<String, ServerOffsets> start, Map<String, ServerOffsets> end) {
        Map<String, ServerOffsets> begins = new LinkedHashMap<>();
        Map<String, ServerOffsets> ends = new LinkedHashMap<>();
        end.forEach(
                (server, position) -> {
                    Map<String, Long> firsts = new LinkedHashMap<>();
                    Map<String, Long> lasts = new LinkedHashMap<>();
                    position.classes()
                            .forEach(
                                    (name, untilNow) -> {
                                        long from = start.get(server).classes().get(name);
                                        boolean isSelected =
                                                (classes == null || classes.contains(name))
                                                        && (servers == null
                                                                || servers.contains(server));
                                        long begin =
                                                isSelected
                                                        ? Math.min(
                                                                Math.max(from, first),
                                                                Math.max(from, untilNow))
                                                        : from;
                                        firsts.put(name, begin);
                                        lasts.put(
                                                name,
                                                isSelected
                                                        ? Math.max(begin, Math.min(untilNow, last))
                                                        : from);
                                    });
                    begins.put(server, new ServerOffsets(start.get(server).memoryId(), firsts));
                    ends.put(server, new ServerOffsets(position.memoryId(), lasts));
                });
        return new Span(begins, ends);
    }
}
