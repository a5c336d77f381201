package io.simplebus.client;

import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.util.Map;

/** JSON of requests, and JSON text as Python writes it. */
public final class Json {
    private static final ObjectMapper MAPPER =
            new ObjectMapper().enable(DeserializationFeature.FAIL_ON_TRAILING_TOKENS);

    private Json() {}

    /** Returns an empty object. */
    public static ObjectNode object() {
        return MAPPER.createObjectNode();
    }

    /** Parses JSON text. */
    public static JsonNode parse(String text) throws IOException {
        return MAPPER.readTree(text);
    }

    /**
     * Returns JSON text with the spaces and escapes of Python's {@code json.dumps}, so that Python and
     * Java store equal offsets as equal texts.
     */
    public static String dump(JsonNode value) {
        StringBuilder text = new StringBuilder();
        append(text, value);
        return text.toString();
    }

    private static void append(StringBuilder text, JsonNode value) {
        if (value.isObject()) {
            text.append('{');
            String separator = "";
            for (Map.Entry<String, JsonNode> field : value.properties()) {
                text.append(separator);
                appendText(text, field.getKey());
                text.append(": ");
                append(text, field.getValue());
                separator = ", ";
            }
            text.append('}');
        } else if (value.isTextual()) {
            appendText(text, value.textValue());
        } else {
            text.append(value);
        }
    }

    private static void appendText(StringBuilder text, String value) {
        text.append('"');
        for (char one : value.toCharArray()) {
            switch (one) {
                case '"' -> text.append("\\\"");
                case '\\' -> text.append("\\\\");
                case '\n' -> text.append("\\n");
                case '\r' -> text.append("\\r");
                case '\t' -> text.append("\\t");
                case '\b' -> text.append("\\b");
                case '\f' -> text.append("\\f");
                default -> {
                    if (one >= ' ' && one <= '~') {
                        text.append(one);
                    } else {
                        text.append(String.format("\\u%04x", (int) one));
                    }
                }
            }
        }
        text.append('"');
    }

    /** Returns a number as Python's {@code format(number, "g")} writes it. */
    public static String format(double number) {
        return number == Math.rint(number)
                ? String.valueOf((long) number)
                : String.valueOf(Math.round(number * 100) / 100.0);
    }
}
