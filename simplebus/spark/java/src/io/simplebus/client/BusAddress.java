package io.simplebus.client;

import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Address of a bus.
 *
 * @param isSecure true to connect with TLS
 */
public record BusAddress(String host, int port, boolean isSecure) {
    private static final int DEFAULT_PORT = 8888;
    private static final int PORT_MAX = 65_535;
    private static final String SCHEME = "simplebus://";
    private static final String SECURE_SCHEME = "simplebuss://";
    private static final Pattern PLACE =
            Pattern.compile("(?<host>\\[[^\\]@/?#]+\\]|[^:\\[\\]@/?#]+)(:(?<port>\\d{1,5})?)?/*");

    /**
     * Parses {@code host:port}, {@code simplebus://host:port}, or {@code simplebuss://host:port} for
     * TLS. An IPv6 host is written in brackets. The default port is 8888.
     *
     * @throws IllegalArgumentException if the text is not an address
     */
    public static BusAddress parse(String text) {
        boolean isSecure = text.startsWith(SECURE_SCHEME);
        String place = text.startsWith(SCHEME) ? text.substring(SCHEME.length()) : text;
        Matcher found = PLACE.matcher(isSecure ? text.substring(SECURE_SCHEME.length()) : place);
        if (found.matches()) {
            String port = found.group("port");
            int number = port == null ? DEFAULT_PORT : Integer.parseInt(port);
            if (number > 0 && number <= PORT_MAX) {
                String host = found.group("host").replaceAll("[\\[\\]]", "");
                return new BusAddress(host.toLowerCase(Locale.ROOT), number, isSecure);
            }
        }
        String expected = text.contains("@") ? "; pass user and password as arguments" : "";
        throw new IllegalArgumentException(
                "'" + text.replaceAll("(?<=//).*@|^[^/]*@", "…@") + "' is not a server address; expected "
                        + "simplebus://host:port or host:port, an IPv6 host in brackets" + expected);
    }

    /** Returns the name of the bus in options and offsets: {@code host:port}. */
    public String name() {
        return toString().startsWith(SCHEME) ? toString().substring(SCHEME.length()) : toString();
    }

    @Override
    public String toString() {
        String shown = host.contains(":") ? "[" + host + "]" : host;
        return (isSecure ? SECURE_SCHEME : SCHEME) + shown + ":" + port;
    }
}
