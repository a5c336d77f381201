package io.simplebus.client;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermission;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Base64;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.net.ssl.KeyManager;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManager;
import javax.net.ssl.TrustManagerFactory;

/**
 * Credentials and TLS settings of a client, as the Python client reads them from the environment.
 *
 * @param ca PEM file of the authorities that sign the certificate of the bus; empty for those of Java
 * @param cert PEM file with the client's certificate, or empty
 * @param key PEM file with the key of {@code cert}, unless {@code cert} contains the key
 */
public record Credentials(
        String user, String password, String token, String ca, String cert, String key) {
    private static final String[] NAMES = {"user", "password", "token", "ca", "cert", "key"};
    private static final Map<String, String> VARIABLES =
            Map.of(
                    "user", "SIMPLEBUS_USER",
                    "password", "SIMPLEBUS_PASSWORD",
                    "token", "SIMPLEBUS_TOKEN",
                    "ca", "SIMPLEBUS_TLS_CA",
                    "cert", "SIMPLEBUS_TLS_CERT",
                    "key", "SIMPLEBUS_TLS_KEY");
    private static final String FILE_VARIABLE = "SIMPLEBUS_CREDENTIALS";
    private static final Pattern SETTING =
            Pattern.compile("\\s*(?<name>\\w+)\\s*=\\s*(\"(?<text>[^\"\\\\]*)\"|'(?<raw>[^']*)')\\s*(#.*)?");
    private static final Pattern PEM =
            Pattern.compile("-----BEGIN (?<kind>[A-Z0-9 ]*)-----(?<body>[^-]*)-----END \\k<kind>-----");
    private static final Set<PosixFilePermission> OWNER_ONLY =
            EnumSet.of(
                    PosixFilePermission.OWNER_READ,
                    PosixFilePermission.OWNER_WRITE,
                    PosixFilePermission.OWNER_EXECUTE);

    /**
     * Returns the settings of the environment, such as SIMPLEBUS_USER and SIMPLEBUS_PASSWORD.
     * Variables replace the values of the file that SIMPLEBUS_CREDENTIALS names.
     *
     * @throws IOException if a file cannot be read or is invalid
     */
    public static Credentials fromEnvironment(Map<String, String> environment) throws IOException {
        Map<String, String> settings = new HashMap<>();
        String file = environment.getOrDefault(FILE_VARIABLE, "");
        if (!file.isEmpty()) {
            settings.putAll(readFile(Path.of(file)));
        }
        Map<String, String> given = new HashMap<>();
        VARIABLES.forEach(
                (name, variable) -> {
                    if (!environment.getOrDefault(variable, "").isEmpty()) {
                        given.put(name, environment.get(variable));
                    }
                });
        if (given.containsKey("token")) {
            settings.keySet().removeAll(Set.of("user", "password"));
        } else if (given.containsKey("user")) {
            settings.remove("token");
        }
        settings.putAll(given);
        for (String name : NAMES) {
            settings.putIfAbsent(name, "");
        }
        return new Credentials(
                settings.get("user"),
                settings.get("password"),
                settings.get("token"),
                settings.get("ca"),
                settings.get("cert"),
                settings.get("key"));
    }

    private static Map<String, String> readFile(Path path) throws IOException {
        Map<String, String> settings = new HashMap<>();
        for (String line : Files.readAllLines(path)) {
            if (line.isBlank() || line.stripLeading().startsWith("#")) {
                continue;
            }
            Matcher found = SETTING.matcher(line);
            if (!found.matches() || !VARIABLES.containsKey(found.group("name"))) {
                throw new IOException(
                        path + ": expected lines such as user = \"ada\", with any of "
                                + String.join(", ", NAMES) + "; got another line");
            }
            String text = found.group("text");
            settings.put(found.group("name"), text == null ? found.group("raw") : text);
        }
        if ((settings.containsKey("password") || settings.containsKey("token"))
                && !OWNER_ONLY.containsAll(Files.getPosixFilePermissions(path))) {
            throw new IOException(path + " holds a secret that others may read; chmod 600 it");
        }
        for (String name : new String[] {"ca", "cert", "key"}) {
            settings.computeIfPresent(name, (key, value) -> path.resolveSibling(value).toString());
        }
        return settings;
    }

    /** Returns true if a user or a token is set. */
    boolean hasAuth() {
        return !token.isEmpty() || !user.isEmpty();
    }

    /**
     * Returns the TLS context.
     *
     * @throws IOException if a certificate or key cannot be read; the message names the file
     */
    SSLContext tlsContext() throws IOException {
        String file = ca;
        try {
            TrustManager[] trusted = ca.isEmpty() ? null : trustManagers(Path.of(ca));
            file = cert;
            KeyManager[] own = cert.isEmpty() ? null : keyManagers();
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(own, trusted, null);
            return context;
        } catch (GeneralSecurityException | IllegalArgumentException error) {
            throw new IOException(
                    file + " has no valid PEM certificate or key: " + error.getMessage(), error);
        } catch (java.nio.file.NoSuchFileException error) {
            throw new IOException(error.getMessage() + " cannot be read: no such file", error);
        }
    }

    private static TrustManager[] trustManagers(Path path)
            throws IOException, GeneralSecurityException {
        KeyStore store = emptyStore();
        int number = 0;
        for (Certificate one : certificates(Files.readString(path))) {
            store.setCertificateEntry("ca-" + number++, one);
        }
        TrustManagerFactory factory =
                TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        factory.init(store);
        return factory.getTrustManagers();
    }

    private KeyManager[] keyManagers() throws IOException, GeneralSecurityException {
        String certificateText = Files.readString(Path.of(cert));
        String keyText = key.isEmpty() ? certificateText : Files.readString(Path.of(key));
        KeyStore store = emptyStore();
        char[] password = new char[0];
        store.setKeyEntry(
                "client", privateKey(keyText), password, certificates(certificateText));
        KeyManagerFactory factory =
                KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
        factory.init(store, password);
        return factory.getKeyManagers();
    }

    private static KeyStore emptyStore() throws IOException, GeneralSecurityException {
        KeyStore store = KeyStore.getInstance("PKCS12");
        store.load(null, null);
        return store;
    }

    private static Certificate[] certificates(String text) throws GeneralSecurityException {
        ByteArrayOutputStream only = new ByteArrayOutputStream();
        Matcher found = PEM.matcher(text);
        while (found.find()) {
            if (found.group("kind").equals("CERTIFICATE")) {
                only.writeBytes(found.group().getBytes(java.nio.charset.StandardCharsets.US_ASCII));
                only.write('\n');
            }
        }
        return CertificateFactory.getInstance("X.509")
                .generateCertificates(new ByteArrayInputStream(only.toByteArray()))
                .toArray(new Certificate[0]);
    }

    private static PrivateKey privateKey(String text) throws GeneralSecurityException {
        Matcher found = PEM.matcher(text);
        while (found.find()) {
            if (!found.group("kind").endsWith("PRIVATE KEY")) {
                continue;
            }
            if (!found.group("kind").equals("PRIVATE KEY")) {
                throw new GeneralSecurityException(
                        "got a key in the form " + found.group("kind") + ", expected PKCS #8, as "
                                + "`openssl pkcs8 -topk8 -nocrypt` writes it");
            }
            byte[] body = Base64.getMimeDecoder().decode(found.group("body"));
            for (String algorithm : new String[] {"EC", "RSA", "Ed25519"}) {
                try {
                    return KeyFactory.getInstance(algorithm)
                            .generatePrivate(new PKCS8EncodedKeySpec(body));
                } catch (java.security.spec.InvalidKeySpecException error) {
                    continue; // Another algorithm.
                }
            }
        }
        throw new GeneralSecurityException("expected a private key of the kind EC, RSA or Ed25519");
    }

    @Override
    public String toString() {
        return "Credentials[user=" + user + "]"; // Without secrets, because it may be logged.
    }
}
