package io.simplebus.client;

import java.util.Collection;
import java.util.Comparator;
import java.util.List;
import java.util.stream.Collectors;

/** Search for similar names, with the results of {@code difflib.get_close_matches} in Python. */
public final class SimilarNames {
    private SimilarNames() {}

    private record Match(String name, double similarity) {}

    /**
     * Returns the most similar names, best first.
     *
     * @param count maximum number of names
     * @param similarityMin lowest similarity, from 0 to 1
     */
    public static List<String> find(
            String word, Collection<String> names, int count, double similarityMin) {
        return names.stream()
                .map(name -> new Match(name, similarity(name, word)))
                .filter(match -> match.similarity >= similarityMin)
                .sorted(
                        Comparator.comparingDouble(Match::similarity)
                                .thenComparing(Match::name)
                                .reversed())
                .limit(count)
                .map(Match::name)
                .collect(Collectors.toList());
    }

    /** Returns twice the number of matching characters, divided by the number of all characters. */
    private static double similarity(String a, String b) {
        int length = a.length() + b.length();
        return length == 0 ? 1 : 2.0 * countMatching(a, b) / length;
    }

    /** Counts the longest common part, and the same to the left and to the right of it. */
    private static int countMatching(String a, String b) {
        int begin = 0;
        int other = 0;
        int longest = 0;
        for (int i = 0; i < a.length(); i++) {
            for (int j = 0; j < b.length(); j++) {
                int size = 0;
                while (i + size < a.length()
                        && j + size < b.length()
                        && a.charAt(i + size) == b.charAt(j + size)) {
                    size++;
                }
                if (size > longest) {
                    begin = i;
                    other = j;
                    longest = size;
                }
            }
        }
        if (longest == 0) {
            return 0;
        }
        return longest
                + countMatching(a.substring(0, begin), b.substring(0, other))
                + countMatching(a.substring(begin + longest), b.substring(other + longest));
    }
}
