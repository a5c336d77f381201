"""Invalid options of the source, each with a part of the error message, for Python and Java."""

from __future__ import annotations

NEEDED = {"servers": "127.0.0.1:8888", "subscribe": "7"}

INVALID_STREAM_OPTIONS: list[tuple[dict[str, str], str]] = [
    ({"maxTriggerDelay": "900000"}, "number above 0 and its unit .*, as in 15m"),
    ({"maxTriggerDelay": "0s"}, "number above 0 and its unit"),
    (
        {"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
        "5 exceeds maxOffsetsPerTrigger",
    ),
    ({"minOffsetPerTrigger": "5"}, "did you mean minOffsetsPerTrigger"),
    ({"durableIdle": "7"}, "number above 0 and its unit"),
    ({"durableIdle": "366d"}, "expected at most 365d"),
    ({"durable": " "}, "a name of 1 to 200 characters, or none"),
    (
        {"endingTimestamp": "5"},
        "no option endingTimestamp here; it is an option of a batch",
    ),
]

INVALID_BATCH_OPTIONS: list[tuple[dict[str, str], str]] = [
    ({"subscribe": "7"}, "servers is missing; expected simplebus host:port"),
    ({"servers": "a", "subscribe": " "}, "subscribe is missing"),
    ({"servers": " , ", "subscribe": "7"}, "servers is ' , ': expected host:port of each bus"),
    ({"path": ",", "subscribe": "7"}, "path is ',': expected host:port of each bus"),
    ({"servers": "http://a", "subscribe": "7"}, "'http://a'.*not a server address"),
    (
        NEEDED | {"startingOffset": "latest"},
        "no option startingOffset here; did you mean start",
    ),
    (NEEDED | {"subscirbe": "8"}, "did you mean subscribe?"),
    (NEEDED | {"zzz": "8"}, "expected servers, "),
    (NEEDED | {"subscribe": "65536"}, "class id is from 0 to 65535, got 65536"),
    (NEEDED | {"subscribe": ","}, "expected classes by name or id"),
    (NEEDED | {"channels": "a.#.b"}, "segment 2 of 3 is the wildcard #, which may only be the l"),
    (NEEDED | {"channels": "x" * 5000}, "of 5000 characters is too long, expected at most 4096 by"),
    (NEEDED | {"channels": "*." * 128 + "a"}, "of 129 segments is too long, expected at most 128"),
    (NEEDED | {"channels": "a.b c"}, "segment 2 holds the character U\\+0020, expected no white"),
    (NEEDED | {"channels": "a..b"}, "channels is 'a..b'"),
    (NEEDED | {"failOnDataLoss": "maybe"}, "failOnDataLoss is 'maybe': expected true or false"),
    (NEEDED | {"minPartitions": "0"}, "expected a whole number from 1 on"),
    (NEEDED | {"minPartitions": "9" * 19}, "expected a whole number from 1 on"),
    (NEEDED | {"timeout": "soon"}, "expected seconds above 0"),
    (NEEDED | {"timeout": "inf"}, "expected seconds above 0"),
    (
        NEEDED | {"startingOffsets": "7"},
        "the JSON has no server; expected earliest, latest or JSON",
    ),
    (NEEDED | {"startingOffsets": '{"a": 7}'}, "the JSON has 7 for a"),
    (NEEDED | {"startingOffsets": '{"a": {"7": -3}}'}, "-1 for latest or -2 for earliest"),
    (NEEDED | {"startingOffsets": '{"a": {"7": 1.5}}'}, "1.5, expected a sequence >= 0"),
    (NEEDED | {"startingOffsets": '{"a": {"7": true}}'}, "True, expected a sequence >= 0"),
    (NEEDED | {"startingOffsets": "{"}, "not valid JSON"),
    (NEEDED | {"startingOffsets": "Latest"}, '"latest" is not a possible start of a batch'),
    (NEEDED | {"endingOffsets": "earliest"}, 'expected "latest" or JSON'),
    (
        NEEDED | {"endingOffsets": '{"a": {"7": -2}}'},
        "-2, expected a sequence >= 0, or -1",
    ),
    (NEEDED | {"startingTimestamp": "-1"}, "expected milliseconds since 1970, a whole number"),
    (
        NEEDED | {"endingTimestamp": "2025-01-01"},
        "endingTimestamp is '2025-01-01': expected mi",
    ),
    (NEEDED | {"startingOffsetsByTimestamp": "5"}, "has no server; expected JSON such as"),
    (
        NEEDED | {"startingOffsetsByTimestamp": '{"a": {"7": -1}}'},
        "class 7 at a has the time -1, expected milliseconds since 1970",
    ),
    (NEEDED | {"startingOffsetsByTimestampStrategy": "x"}, "expected error or latest"),
    (
        NEEDED | {"maxoffsetspertrigger": "5"},
        "no option maxOffsetsPerTrigger here; it is an option of a stream",
    ),
    (NEEDED | {"kafka.bootstrap.servers": "a:9092"}, "here; use servers, with host:port of each"),
    (NEEDED | {"subscribePattern": "order.*"}, "both subscribe and subscribePattern are set"),
    ({"servers": "a", "subscribePattern": "order("}, "'order\\(': expected a regular expression"),
    ({"servers": "a", "subscribePattern": " "}, "' ': expected a regular expression"),
    (NEEDED | {"schema": "a int"}, "here; parse the values by simplebus.spark.parse_json, or by"),
    (NEEDED | {"assign": "{}"}, "here; use subscribe, since a class has no partitions"),
    (
        NEEDED | {"groupidprefix": "x"},
        "option groupIdPrefix here; use durable in a stream; a batch needs none",
    ),
    (NEEDED | {"kafka.SASL.jaas.config": "x"}, "here; credentials and certificates are taken from"),
    (NEEDED | {"kafka.fetch.min.bytes": "1"}, "here; settings of a Kafka client do not apply"),
    (NEEDED | {"class": "7"}, "no option class here; it is an option of a sink"),
]
