package io.simplebus.spark;

import java.io.Closeable;
import java.io.IOException;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.regex.Pattern;

/** Readers by server, opened on first use. They are used by one thread at a time. */
final class BusReaders implements Closeable {
    private final SourceOptions options;
    private final Map<String, BusReader> open = new LinkedHashMap<>();

    BusReaders(SourceOptions options) {
        this.options = options;
    }

    SourceOptions options() {
        return options;
    }

    /**
     * Returns options that list the classes whose names match {@code subscribePattern} now, without
     * those of dead letters.
     *
     * @throws ClassMissingException if no name matches
     */
    static SourceOptions resolvePattern(SourceOptions options) {
        if (options.subscribePattern().isEmpty()) {
            return options;
        }
        Set<String> found = new TreeSet<>();
        try (BusReaders buses = new BusReaders(options)) {
            for (String server : options.servers()) {
                found.addAll(buses.get(server).classNames());
            }
        } catch (IOException error) {
            throw new UnreachableException(error);
        }
        Pattern pattern = Pattern.compile(options.subscribePattern());
        found.removeIf(
                name -> BusReader.isDeadLetterClass(name) || !pattern.matcher(name).matches());
        if (found.isEmpty()) {
            throw new ClassMissingException(
                    "no class at " + String.join(", ", options.servers())
                            + " matches the option subscribePattern, '"
                            + options.subscribePattern() + "'",
                    null);
        }
        return options.withSubscribe(List.copyOf(found));
    }

    /** Returns the reader of a server, connected on first use. */
    BusReader get(String server) throws IOException {
        BusReader found = open.get(server);
        if (found == null) {
            found = new BusReader(server, options.timeoutSeconds(), false);
            open.put(server, found);
        }
        return found;
    }

    Collection<BusReader> all() {
        return open.values();
    }

    /** Closes the reader of a server; the next use opens a new one. */
    void close(String server) {
        BusReader found = open.remove(server);
        if (found != null) {
            found.close();
        }
    }

    /**
     * Replaces times by offsets. Call it before extents are fetched, so that the offsets lie within
     * them.
     */
    OffsetSpec resolveTimes(OffsetSpec wanted) throws IOException {
        if (!wanted.isTime()) {
            return wanted;
        }
        wanted.checkNames(options.servers(), options.subscribe());
        Map<String, Map<String, Long>> found = new LinkedHashMap<>();
        for (String server : options.servers()) {
            Map<String, Long> times = new LinkedHashMap<>();
            for (String name : options.subscribe()) {
                times.put(name, wanted.timeFor(server, name));
            }
            Map<String, Long> sequences = new LinkedHashMap<>();
            get(server)
                    .findFirstSince(times)
                    .forEach(
                            (name, sequence) ->
                                    sequences.put(
                                            name,
                                            sequence == null
                                                    ? wanted.offsetPastEnd(server, name)
                                                    : (long) sequence));
            found.put(server, sequences);
        }
        return wanted.withSequences(found);
    }

    /** Throws if two names are the same bus: its messages would be read twice. */
    static void checkDistinct(Map<String, BusExtent> extents) {
        Map<String, String> names = new HashMap<>();
        extents.forEach(
                (server, extent) -> {
                    String other = names.putIfAbsent(extent.memoryId(), server);
                    if (other != null) {
                        throw new OffsetException(
                                "servers has " + other + " and " + server
                                        + ", which are the same bus; drop one of them");
                    }
                });
    }

    @Override
    public void close() {
        open.values().forEach(BusReader::close);
        open.clear();
    }
}
