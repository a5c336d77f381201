package io.simplebus.spark;

import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.function.Function;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/** Options as a user gives them. Names are case-insensitive. */
final class OptionReader {
    private static final Map<String, Double> UNITS =
            Map.of("ms", 0.001, "s", 1.0, "m", 60.0, "min", 60.0, "h", 3600.0, "d", 86_400.0);
    private static final Pattern DURATION =
            Pattern.compile("(?<number>\\d{1,9}(\\.\\d+)?)\\s*(?<unit>ms|s|min|m|h|d)");
    private static final Pattern COUNT = Pattern.compile("0*[1-9]\\d{0,17}");

    private final Map<String, String> values;
    private final Map<String, String> expected;

    /**
     * Checks the names of the options.
     *
     * @param use use of the options, of {@link OptionNames}
     */
    OptionReader(Map<String, String> options, String use) {
        values =
                options.entrySet().stream()
                        .collect(
                                Collectors.toMap(
                                        one -> one.getKey().toLowerCase(Locale.ROOT),
                                        Map.Entry::getValue,
                                        (first, second) -> second));
        expected = OptionNames.expectedValues(use);
        Set<String> known =
                expected.keySet().stream()
                        .map(name -> name.toLowerCase(Locale.ROOT))
                        .collect(Collectors.toSet());
        for (String name : options.keySet()) {
            if (!known.contains(name.toLowerCase(Locale.ROOT))) {
                throw new IllegalArgumentException(OptionNames.unknownOptionMessage(name, use));
            }
        }
    }

    boolean has(String name) {
        return values.containsKey(name.toLowerCase(Locale.ROOT));
    }

    /** Returns the value of an option; {@code otherwise} if it is not set. */
    <T> T get(String name, T otherwise, Function<String, T> read) {
        String text = values.get(name.toLowerCase(Locale.ROOT));
        if (text == null) {
            return otherwise;
        }
        try {
            return read.apply(text);
        } catch (IllegalArgumentException error) {
            throw new IllegalArgumentException(
                    "the option " + name + " is '" + text + "': " + error.getMessage(), error);
        }
    }

    <T> T required(String name, Function<String, T> read) {
        if (values.getOrDefault(name.toLowerCase(Locale.ROOT), "").isBlank()) {
            throw new IllegalArgumentException(
                    "the option " + name + " is missing; expected " + expected.get(name));
        }
        return get(name, null, read);
    }

    static List<String> splitList(String text) {
        return Arrays.stream(text.split(","))
                .map(String::strip)
                .filter(part -> !part.isEmpty())
                .distinct()
                .collect(Collectors.toList());
    }

    static boolean parseBoolean(String text) {
        String word = text.strip().toLowerCase(Locale.ROOT);
        if (!word.equals("true") && !word.equals("false")) {
            throw new IllegalArgumentException("expected true or false");
        }
        return word.equals("true");
    }

    static Long parseCount(String text) {
        if (!COUNT.matcher(text.strip()).matches()) {
            throw new IllegalArgumentException("expected a whole number from 1 on");
        }
        return Long.valueOf(text.strip());
    }

    static double parseSeconds(String text) {
        double found = -1;
        try {
            found = Double.parseDouble(text.strip());
        } catch (NumberFormatException error) {
            // Reported below.
        }
        if (!(found > 0 && found < Double.POSITIVE_INFINITY)) {
            throw new IllegalArgumentException("expected seconds above 0");
        }
        return found;
    }

    /** Returns the seconds of a number with a unit. */
    static double parseDuration(String text) {
        Matcher found = DURATION.matcher(text.strip().toLowerCase(Locale.ROOT));
        if (!found.matches() || Double.parseDouble(found.group("number")) == 0) {
            throw new IllegalArgumentException(
                    "expected a number above 0 and its unit (ms, s, m, min, h, d), as in 15m");
        }
        return Double.parseDouble(found.group("number")) * UNITS.get(found.group("unit"));
    }
}
