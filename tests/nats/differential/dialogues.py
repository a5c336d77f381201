"""Dialogues of clients with a server without authentication, by name.

nats-server defines the right output.
"""

from __future__ import annotations

from tests.nats.differential.compare import Script, Step

QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
LOUD = b'CONNECT {"verbose":true,"pedantic":false}\r\n'
STRICT = b'CONNECT {"verbose":false,"pedantic":true}\r\n'
HEADERS = b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n'
ASKING = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
DEAF = b'CONNECT {"verbose":false,"pedantic":false,"echo":false}\r\n'
BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"


def alone(*data: bytes, **options: int) -> Script:
    """Return the script of one client."""
    return tuple(Step("a", data_part, **options) for data_part in data)


def received_by_b(said_by_a: bytes, *, b: bytes = QUIET + b"SUB > 1\r\n") -> Script:
    """Return a script in which client b receives everything that client a publishes."""
    return (Step("b", b), Step("a", said_by_a))


CONNECTING: dict[str, Script] = {
    "the server speaks first": alone(b""),
    "a ping behind connect is answered behind its ok": alone(b"CONNECT {}\r\nPING\r\n"),
    "nothing but ok comes before the first pong": alone(LOUD + b"PING\r\n"),
    "quiet clients hear a pong alone": alone(QUIET + b"PING\r\n"),
    "protocol 1 has info behind its first pong": alone(
        b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n', b"PING\r\n"
    ),
    "protocol 0 has no info behind its pong": alone(
        b'CONNECT {"verbose":false,"protocol":0}\r\nPING\r\n'
    ),
    "a pong before a connect of protocol 1": alone(
        b"PING\r\n", b'CONNECT {"verbose":false,"protocol":1}\r\n', b"PING\r\n"
    ),
    "without connect a client is verbose and receives its own messages": alone(
        b"PING\r\nSUB foo 1\r\nPUB foo 1\r\nx\r\n"
    ),
    "without connect a client is pedantic": alone(b"PUB foo.* 1\r\nx\r\n"),
    "an empty connect leaves the defaults": alone(
        b"CONNECT {}\r\nSUB foo 1\r\nPUB foo 1\r\nx\r\nPUB a..b 1\r\nx\r\n"
    ),
    "a second connect applies anew": alone(QUIET + b"PING\r\n", LOUD + b"PING\r\nSUB a 1\r\n"),
    "a second connect leaves what it does not say": alone(
        QUIET, b"CONNECT {}\r\nSUB a 1\r\n", b'CONNECT {"verbose":true}\r\nPUB a..b 0\r\n\r\n'
    ),
    "a second connect drops all subscriptions": alone(
        QUIET + b"SUB foo 1\r\n" + QUIET + b"PUB foo 1\r\nx\r\nSUB foo 1\r\nPUB foo 1\r\ny\r\n"
    ),
    "a second connect in a later step drops them too": alone(
        QUIET + b"SUB foo 1\r\nSUB f.* g 2\r\n", QUIET, b"PUB foo 1\r\nx\r\nPUB f.o 1\r\nx\r\n"
    ),
    "a third connect drops them again": alone(
        QUIET + b"SUB foo 1\r\n" + QUIET + b"SUB foo 1\r\n" + QUIET + b"PUB foo 1\r\nx\r\n"
    ),
    "a first connect behind subscriptions": alone(b"SUB foo 1\r\n" + QUIET + b"PUB foo 0\r\n\r\n"),
    "words of connect": alone(b'CONNECT {"VERBOSE":false,"Pedantic":false}\r\nPUB a..b 0\r\n\r\n'),
    "a word twice": alone(b'CONNECT {"verbose":true,"verbose":false}\r\nPING\r\n'),
    "a word twice, differently written": alone(
        b'CONNECT {"verbose":true,"Verbose":false}\r\nSUB a 1\r\n'
    ),
    "null leaves a default": alone(b'CONNECT {"verbose":null,"echo":null}\r\nSUB a 1\r\n'),
    "null for all options": alone(b"CONNECT null\r\nSUB a 1\r\n"),
    "unknown options": alone(b'CONNECT {"foo":5,"bar":[{}],"verbose":false}\r\nPING\r\n'),
    "all options that clients send": alone(
        b'CONNECT {"verbose":false,"pedantic":false,"user":"u","pass":"p","lang":"python3",'
        b'"version":"2.9.0","name":"n","protocol":1,"echo":true,"tls_required":false,'
        b'"headers":true,"no_responders":true,"auth_token":"t","nkey":"","sig":"","jwt":""}\r\n'
    ),
    "credentials nobody asked for": alone(b'CONNECT {"nkey":"x","sig":"y","jwt":"z"}\r\n'),
    "tls that is not there": alone(b'CONNECT {"tls_required":true}\r\n'),
    "no argument": alone(b"CONNECT\r\n"),
    "a blank argument": alone(b"CONNECT \r\n"),
    "no blank": alone(b"CONNECT{}\r\n"),
    "blanks behind the options": alone(b"CONNECT {} \t \r\n"),
    "a tab and a bare newline": alone(b"CONNECT\t{}\n"),
    "a list for options": alone(b"CONNECT []\r\n"),
    "a string for options": alone(b'CONNECT "verbose"\r\n'),
    "a number for options": alone(b"CONNECT 5\r\n"),
    "words behind the options": alone(b"CONNECT {} x\r\n"),
    "options that do not end": alone(b'CONNECT {"verbose":false\r\n'),
    "options that end twice": alone(b'CONNECT {"name":"a"}}\r\n'),
    "options in single quotes": alone(b"CONNECT {'a':1}\r\n"),
    "a number that is none": alone(b'CONNECT {"a":NaN}\r\n'),
    "a number with a leading zero": alone(b'CONNECT {"a":01}\r\n'),
    "a tab in a string": alone(b'CONNECT {"name":"\t"}\r\n'),
    "verbose is a number": alone(b'CONNECT {"verbose":1}\r\n'),
    "verbose is a string": alone(b'CONNECT {"verbose":"true"}\r\n'),
    "a name that is a number": alone(b'CONNECT {"name":5}\r\n'),
    "half of a character": alone(b'CONNECT {"name":"\\ud800","verbose":false}\r\n'),
    "bytes that are no text": alone(b'CONNECT {"name":"\xff\xc3","verbose":false}\r\n'),
    "protocol 2": alone(b'CONNECT {"protocol":2}\r\n'),
    "protocol below 0": alone(b'CONNECT {"protocol":-1}\r\n'),
    "protocol with a point": alone(b'CONNECT {"protocol":1.0}\r\n'),
    "protocol with an exponent": alone(b'CONNECT {"protocol":1e0}\r\n'),
    "protocol beyond all numbers": alone(b'CONNECT {"protocol":99999999999999999999}\r\n'),
    "protocol 2 in a verbose second connect": alone(LOUD, b'CONNECT {"protocol":2}\r\n'),
    "no responders without headers": alone(b'CONNECT {"no_responders":true}\r\n'),
    "no responders in a second connect": alone(HEADERS, b'CONNECT {"no_responders":true}\r\n'),
    "an account": alone(b'CONNECT {"account":"x"}\r\n'),
    "the account that everybody has": alone(b'CONNECT {"account":"$G"}\r\n'),
    "a new account": alone(b'CONNECT {"new_account":true}\r\n'),
    "no account": alone(b'CONNECT {"account":"","new_account":false}\r\n'),
    "words in another case than verbs": alone(b'connect {"verbose":false}\r\nping\r\nPiNg\r\n'),
    "options deep in brackets": alone(
        b'CONNECT {"verbose":false,"a":' + b"[" * 100 + b"]" * 100 + b"}\r\n"
    ),
}

LEXING: dict[str, Script] = {
    "verbs in any case": alone(QUIET + b"sub foo 1\r\nPuB foo 1\r\nx\r\nuNsUb 1\r\npInG\r\n"),
    "blanks and tabs between words": alone(
        QUIET + b"SUB \t foo\t \t1\r\nPUB\tfoo  \t bar\t1\r\nx\r\nUNSUB\t1\t\r\n"
    ),
    "blanks at the end of a line": alone(QUIET + b"SUB foo 1  \r\nPUB foo 1 \r\nx\r\n"),
    "a blank in front of a verb": alone(QUIET + b" PING\r\n", pings=0),
    "an empty line": alone(QUIET + b"\r\n"),
    "a bare newline": alone(QUIET + b"\n"),
    "lines that end with a bare newline": alone(
        b'CONNECT {"verbose":false}\nPING\nSUB foo 1\nPUB foo 3\nabc\r\nUNSUB 1\n'
    ),
    "a payload that ends with a bare newline": alone(QUIET + b"PUB foo 1\r\nx\n"),
    "a payload that ends with a newline and a return": alone(QUIET + b"PUB foo 1\r\nx\n\r"),
    "a payload that ends with two returns": alone(QUIET + b"PUB foo 1\r\nx\r\r\n"),
    "a payload that is too long": received_by_b(QUIET + b"PUB foo 2\r\nxyz\r\n"),
    "a payload that is too short swallows what follows": (
        Step("b", QUIET + b"SUB > 1\r\n"),
        Step("a", QUIET + b"PUB foo 10\r\nxyz\r\nPING\r\n\r\n", pings=0),
    ),
    "leading zeros of a size are kept": received_by_b(QUIET + b"PUB foo 002\r\nxy\r\n"),
    "nine digits of a size": received_by_b(QUIET + b"PUB foo 000000002\r\nxy\r\n"),
    "ten digits of a size": received_by_b(QUIET + b"PUB foo 0000000002\r\nxy\r\n"),
    "junk behind a ping": alone(QUIET + b"PINGx\r\nPING x\r\nPINGPING\r\n"),
    "junk behind a pong": alone(QUIET + b"PONGx\r\nPONG x\r\nPONG\r\nPING\r\n"),
    "a return in the middle of a ping": alone(QUIET + b"PING\rx\r\nPING\r\n"),
    "a ping without a return": alone(QUIET + b"PING\n"),
    "half a verb": alone(QUIET + b"PUX foo 1\r\n"),
    "a verb that is none": alone(QUIET + b"HELLO\r\n"),
    "a verb of the server": alone(QUIET + b"MSG foo 1 1\r\nx\r\n"),
    "a verb of the server with headers": alone(QUIET + b"HMSG foo 1 12 12\r\nNATS/1.0\r\n\r\n\r\n"),
    "ok from a client is heard": alone(QUIET + b"+OK\r\nPING\r\n"),
    "info from a client is heard": alone(QUIET + b"INFO {}\r\nPING\r\n"),
    "info of a client that is no json": alone(QUIET + b"INFO x\r\nPING\r\n"),
    "an error from a client ends it": alone(QUIET + b"-ERR 'x'\r\nPING\r\n", pings=0),
    "an error from a client without words": alone(QUIET + b"-ERR\r\nPING\r\n", pings=0),
    "http": alone(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "bytes of another protocol": alone(b"\x16\x03\x01\x00\xa5\x01\x00\x00"),
    "a line as long as allowed": alone(QUIET + b"SUB " + b"a" * 4090 + b" 1\r\n"),
    "a line longer than allowed": alone(QUIET + b"SUB " + b"a" * 4100 + b" 1\r\n"),
    "a line longer than allowed that does not end": alone(QUIET + b"SUB " + b"a" * 8000),
    "a connect longer than allowed": alone(b'CONNECT {"name":"' + b"a" * 4100 + b'"}\r\n'),
    "a pub longer than allowed": alone(QUIET + b"PUB " + b"a" * 4100 + b" 0\r\n\r\n"),
    "a subject of two thousand words": alone(
        QUIET + b"SUB " + b"a." * 2000 + b"a 1\r\nPUB " + b"a." * 2000 + b"a 1\r\nx\r\n"
    ),
    "a ping with a long tail": alone(QUIET + b"PING" + b"x" * 5000 + b"\r\nPING\r\n"),
}

PUBLISHING: dict[str, Script] = {
    "a message": received_by_b(QUIET + b"PUB foo 3\r\nabc\r\n"),
    "a message without a payload": received_by_b(QUIET + b"PUB foo 0\r\n\r\n"),
    "a message with a reply": received_by_b(QUIET + b"PUB foo bar.1 3\r\nabc\r\n"),
    "a payload with line ends in it": received_by_b(
        QUIET + b"PUB foo 16\r\n\r\nPUB x 1\r\ny\r\n\x00\xff\r\n"
    ),
    "a payload of returns": received_by_b(QUIET + b"PUB foo 4\r\n\r\r\n\r\r\n"),
    "many messages": received_by_b(QUIET + b"PUB foo 3\r\nabc\r\n" * 100),
    "many messages of many subjects": received_by_b(
        QUIET + b"".join(b"PUB foo.%d %d\r\n%s\r\n" % (i % 7, i, b"x" * i) for i in range(100))
    ),
    "a verbose client is told of each": received_by_b(LOUD + b"PUB foo 1\r\nx\r\n" * 3),
    "a verbose client is told of each of many": alone(
        LOUD + b"SUB foo 1\r\n" + b"PUB foo 1\r\nx\r\n" * 60
    ),
    "a verbose client is told of each of many subjects": alone(
        LOUD + b"SUB > 1\r\n" + b"".join(b"PUB foo.%d 1\r\nx\r\n" % (i % 7) for i in range(60))
    ),
    "no arguments": alone(QUIET + b"PUB\r\n"),
    "blanks for arguments": alone(QUIET + b"PUB  \r\n"),
    "a subject without a size": alone(QUIET + b"PUB foo\r\n"),
    "four arguments": alone(QUIET + b"PUB foo bar 1 2\r\nx\r\n"),
    "a size that is no number": alone(QUIET + b"PUB foo x\r\n"),
    "a size below 0": alone(QUIET + b"PUB foo -1\r\n"),
    "a size with a sign": alone(QUIET + b"PUB foo +1\r\nx\r\n"),
    "a size with a point": alone(QUIET + b"PUB foo 1.0\r\nx\r\n"),
    "a payload longer than allowed": alone(QUIET + b"PUB foo 1048577\r\n"),
    "a payload as long as allowed": (
        Step("b", QUIET + b"SUB > 1\r\n"),
        Step("a", QUIET + b"PUB foo 1048576\r\n" + b"x" * 1048576 + b"\r\n"),
    ),
    "one gigabyte announced": alone(QUIET + b"PUB foo 999999999\r\n"),
    "a wildcard reaches the one who subscribed to it": alone(
        QUIET + b"SUB foo.* 1\r\nSUB foo.> 2\r\nSUB foo.x 3\r\nPUB foo.* 1\r\nx\r\n"
        b"PUB foo.> 1\r\nx\r\nPUB * 1\r\nx\r\nPUB > 1\r\nx\r\n"
    ),
    "a pedantic client is told of a wildcard, which is delivered": alone(
        STRICT + b"SUB foo.* 1\r\nPUB foo.* 1\r\nx\r\nPUB foo.> 1\r\nx\r\n"
    ),
    "a pedantic and verbose client receives the error first": alone(
        b"CONNECT {}\r\nSUB foo.* 1\r\nPUB foo.* 1\r\nx\r\n"
    ),
    "a pedantic client and many odd messages": alone(
        STRICT + b"SUB > 1\r\n" + b"PUB foo.* 1\r\nx\r\n" * 15
    ),
    "empty words of a subject match nobody": alone(
        QUIET
        + b"SUB > 1\r\nSUB *.* 2\r\nSUB a.> 3\r\nPUB a..b 1\r\nx\r\nPUB .a 1\r\nx\r\n"
        + b"PUB a. 1\r\nx\r\nPUB . 1\r\nx\r\nPUB .. 1\r\nx\r\n"
    ),
    "a pedantic client is told of empty words": alone(
        STRICT + b"SUB > 1\r\nPUB a..b 1\r\nx\r\nPUB a. 1\r\nx\r\nPUB . 1\r\nx\r\n"
    ),
    "a pedantic client may have wildcards inside words": alone(
        STRICT + b"SUB a*b.>c 1\r\nPUB a*b.>c 1\r\nx\r\nPUB a#b 1\r\nx\r\nPUB # 1\r\nx\r\n"
    ),
    "a hash is a word like any other": alone(
        QUIET
        + b"SUB a.# 1\r\nSUB # 2\r\nSUB #.> 3\r\nPUB a.# 1\r\nx\r\nPUB a 1\r\nx\r\n"
        + b"PUB a.b.c 1\r\nx\r\nPUB # 1\r\nx\r\nPUB #.a 1\r\nx\r\n"
    ),
    "hashes, percents and backslashes are words": alone(
        QUIET
        + b"".join(
            b"SUB %s %d\r\nPUB %s 1\r\nx\r\n" % (word, index, word)
            for index, word in enumerate(
                [b"a.%23", b"\\#.b", b"##", b"%", b"a.#.b", b"\\.x", b"#x"]
            )
        )
    ),
    "bytes of any kind in a subject": alone(
        QUIET + b"SUB a.\xff\xc3 1\r\nSUB \xe4\xbd\xa0.* 2\r\nPUB a.\xff\xc3 1\r\nx\r\n"
        b"PUB \xe4\xbd\xa0.\x01 1\r\nx\r\nPUB \xe4.\x7f 0\r\n\r\n"
    ),
    "a reply that is a wildcard": received_by_b(STRICT + b"PUB foo a.* 1\r\nx\r\n"),
    "a reply with empty words": received_by_b(STRICT + b"PUB foo a..b 1\r\nx\r\n"),
    "a reply that the server keeps for itself": received_by_b(
        QUIET + b"PUB foo _R_.x 1\r\nx\r\nPUB foo _R_. 1\r\nx\r\nPUB foo _R_ 1\r\nx\r\n"
        b"PUB foo _GR_.x 1\r\nx\r\nPUB foo $GNR.x 1\r\nx\r\nPUB foo _R_x.y 1\r\nx\r\n"
        b"PUB foo $JS.ACK.a.b 1\r\nx\r\nPUB foo $JS.ACK.a.b.1.2.3.4.5 1\r\nx\r\n"
        b"PUB foo $JS.ACK 1\r\nx\r\nPUB foo $JS.API.x 1\r\nx\r\n"
    ),
    "a verbose client and a reply that the server keeps": received_by_b(
        LOUD + b"PUB foo _R_.x 1\r\nx\r\nPUB foo 1\r\nx\r\n"
    ),
    "case counts": received_by_b(QUIET + b"PUB FOO 1\r\nx\r\n", b=QUIET + b"SUB foo 1\r\n"),
    "nobody listens": alone(QUIET + b"PUB foo 1\r\nx\r\nPING\r\n"),
    "the order of one publisher is kept": (
        Step("b", QUIET + b"SUB a.* 1\r\nSUB b 2\r\n"),
        Step(
            "a",
            QUIET
            + b"".join(
                b"PUB %s 2\r\n%02d\r\n" % (s, i) for i in range(40) for s in (b"a.x", b"b", b"a.y")
            ),
        ),
    ),
    "several publishers": (
        Step("c", QUIET + b"SUB > 1\r\n"),
        Step("a", QUIET + b"PUB a 1\r\n1\r\n"),
        Step("b", QUIET + b"PUB b 1\r\n2\r\n"),
        Step("a", b"PUB a 1\r\n3\r\n"),
    ),
}

HEADER: dict[str, Script] = {
    "headers reach who wants them": (
        Step("b", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo 18 21\r\n" + BLOCK + b"abc\r\n"),
    ),
    "headers with a reply": (
        Step("b", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo bar 18 21\r\n" + BLOCK + b"abc\r\n"),
    ),
    "headers are stripped for who does not": (
        Step("b", QUIET + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo bar 18 21\r\n" + BLOCK + b"abc\r\n"),
    ),
    "headers are stripped whose sizes have leading zeros": (
        Step("b", QUIET + b"SUB > 1\r\n"),
        Step("c", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo bar 018 0021\r\n" + BLOCK + b"abc\r\n"),
    ),
    "headers without a payload": (
        Step("b", QUIET + b"SUB > 1\r\n"),
        Step("c", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo 18 18\r\n" + BLOCK + b"\r\n"),
    ),
    "many messages with headers": (
        Step("b", QUIET + b"SUB > 1\r\n"),
        Step("c", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + (b"HPUB foo bar 18 21\r\n" + BLOCK + b"abc\r\n") * 60),
    ),
    "a plain message to who wants headers": (
        Step("b", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"PUB foo 3\r\nabc\r\n"),
    ),
    "headers that are garbage": (
        Step("b", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo 3 5\r\nabcde\r\nHPUB foo 1 1\r\n\x00\r\n"),
    ),
    "headers of no size": (
        Step("b", HEADERS + b"SUB > 1\r\n"),
        Step("a", HEADERS + b"HPUB foo 0 5\r\nabcde\r\n"),
    ),
    "headers from who did not say so": alone(QUIET + b"HPUB foo 18 21\r\n" + BLOCK + b"abc\r\n"),
    "headers without connect": alone(b"HPUB foo 18 21\r\n" + BLOCK + b"abc\r\n"),
    "headers longer than the message": alone(HEADERS + b"HPUB foo 22 21\r\n"),
    "headers below 0": alone(HEADERS + b"HPUB foo -1 21\r\n"),
    "headers that are no number": alone(HEADERS + b"HPUB foo x 21\r\n"),
    "headers without a total": alone(HEADERS + b"HPUB foo 21\r\n"),
    "headers with five arguments": alone(HEADERS + b"HPUB foo a b 1 2\r\nxy\r\n"),
    "headers and no arguments": alone(HEADERS + b"HPUB\r\n"),
    "headers beyond the largest payload": alone(HEADERS + b"HPUB foo 18 1048577\r\n"),
    "a verbose client with headers": alone(
        b'CONNECT {"headers":true}\r\nSUB foo 1\r\nHPUB foo 18 21\r\n' + BLOCK + b"abc\r\n"
    ),
    "headers are no longer wanted": alone(
        HEADERS + b"SUB a 1\r\n" + QUIET + b"SUB foo 1\r\nPUB foo 1\r\nx\r\n",
        b"HPUB foo 18 18\r\n" + BLOCK + b"\r\n",
    ),
}

SUBSCRIBING: dict[str, Script] = {
    "one word for a star": alone(
        QUIET + b"SUB a.* 1\r\nSUB *.b 2\r\nSUB * 3\r\nPUB a.b 1\r\nx\r\nPUB a 1\r\nx\r\n"
        b"PUB a.b.c 1\r\nx\r\n"
    ),
    "one word or more for an arrow": alone(
        QUIET + b"SUB a.> 1\r\nSUB > 2\r\nPUB a 1\r\nx\r\nPUB a.b 1\r\nx\r\nPUB a.b.c 1\r\nx\r\n"
    ),
    "wildcards inside words are letters": alone(
        QUIET + b"SUB a* 1\r\nSUB a>.b 2\r\nPUB ab 1\r\nx\r\nPUB a* 1\r\nx\r\nPUB a>.b 1\r\nx\r\n"
    ),
    "overlapping subscriptions have a copy each": alone(
        QUIET + b"SUB a.b 1\r\nSUB a.* 2\r\nSUB a.> 3\r\nSUB > 4\r\nSUB a.b 5\r\nPUB a.b 1\r\nx\r\n"
    ),
    "overlapping subscriptions and many messages": alone(
        QUIET + b"SUB a.b 1\r\nSUB > 2\r\n", *[b"PUB a.b 1\r\nx\r\n"] * 3
    ),
    "a sid may be any word": alone(
        QUIET + b"SUB a abc\r\nSUB a -1\r\nSUB a 1.5\r\nSUB a \xff\r\nPUB a 1\r\nx\r\nUNSUB abc\r\n"
        b"PUB a 1\r\ny\r\n"
    ),
    "a sid that is there already": alone(
        LOUD + b"SUB a 1\r\nSUB b 1\r\nPUB a 1\r\nx\r\nPUB b 1\r\nx\r\n"
    ),
    "a sid that is there already, of a bad subject": alone(LOUD + b"SUB a 1\r\nSUB a..b 1\r\n"),
    "sids that differ by leading zeros": alone(QUIET + b"SUB a 1\r\nSUB a 01\r\nPUB a 0\r\n\r\n"),
    "a sid again behind its end": alone(
        QUIET + b"SUB a 1\r\nUNSUB 1\r\nSUB b 1\r\nPUB a 1\r\nx\r\nPUB b 1\r\nx\r\n"
    ),
    "subjects that are none": alone(
        QUIET + b"SUB a..b 1\r\nSUB .a 2\r\nSUB a. 3\r\nSUB . 4\r\nSUB a.>.b 5\r\nSUB >.a 6\r\n"
        b"SUB > 7\r\n"
    ),
    "subjects that are none, verbose": alone(LOUD + b"SUB a..b 1\r\nSUB a.>.b g 5\r\nUNSUB 1\r\n"),
    "a subject that was refused leaves its sid": alone(
        QUIET + b"SUB a..b 1\r\nSUB a 1\r\nPUB a 1\r\nx\r\n"
    ),
    "a subscription without arguments": alone(QUIET + b"SUB\r\n"),
    "a subscription of one argument": alone(QUIET + b"SUB a\r\n"),
    "a subscription of four arguments": alone(QUIET + b"SUB a b c d\r\n"),
    "many subscriptions end with a connection": (
        Step("a", QUIET + b"SUB foo 1\r\nSUB foo 2\r\nSUB f.* 3\r\nXX\r\n"),
        Step("b", ASKING + b"SUB in 9\r\nPUB foo in 1\r\nx\r\n"),
    ),
    "a queue name with dots and wildcards": alone(
        QUIET + b"SUB foo a.b 1\r\nSUB foo a.* 2\r\nSUB foo > 3\r\nPUB foo 1\r\nx\r\n"
    ),
    "a word of the server in a subject": alone(
        QUIET + b"SUB $SYS.> 1\r\nSUB _R_.> 2\r\nSUB $JS.API.> 3\r\nPUB $SYS.a 1\r\nx\r\n"
        b"PUB _R_.a 1\r\nx\r\n"
    ),
}

UNSUBSCRIBING: dict[str, Script] = {
    "at once": alone(QUIET + b"SUB a 1\r\nPUB a 1\r\nx\r\nUNSUB 1\r\nPUB a 1\r\ny\r\n"),
    "a sid that is not there": alone(LOUD + b"UNSUB 1\r\nUNSUB 1 5\r\n"),
    "quietly, a sid that is not there": alone(QUIET + b"UNSUB 1\r\n"),
    "twice": alone(LOUD + b"SUB a 1\r\nUNSUB 1\r\nUNSUB 1\r\n"),
    "when so many came": alone(QUIET + b"SUB a 1\r\nUNSUB 1 2\r\n" + b"PUB a 1\r\nx\r\n" * 4),
    "when so many came, one by one": alone(
        QUIET + b"SUB a 1\r\nUNSUB 1 2\r\n", *[b"PUB a 1\r\nx\r\n"] * 4
    ),
    "counted from the beginning": alone(
        QUIET + b"SUB a 1\r\n" + b"PUB a 1\r\nx\r\n" * 2 + b"UNSUB 1 3\r\n",
        *[b"PUB a 0\r\n\r\n"] * 3,
    ),
    "when so many came already": alone(
        QUIET + b"SUB a 1\r\n" + b"PUB a 1\r\nx\r\n" * 3 + b"UNSUB 1 3\r\n", b"PUB a 1\r\nx\r\n"
    ),
    "when more came already": alone(
        QUIET + b"SUB a 1\r\n" + b"PUB a 1\r\nx\r\n" * 3 + b"UNSUB 1 2\r\n", b"PUB a 1\r\nx\r\n"
    ),
    "the sid is free behind the last": alone(
        QUIET + b"SUB a 1\r\nUNSUB 1 1\r\nPUB a 1\r\nx\r\nSUB b 1\r\nPUB b 1\r\ny\r\n"
    ),
    "the limit is changed": alone(
        QUIET + b"SUB a 1\r\nUNSUB 1 5\r\nPUB a 1\r\nx\r\nUNSUB 1 2\r\n" + b"PUB a 1\r\nx\r\n" * 4
    ),
    "a limit is lifted by one that is none": alone(
        QUIET + b"SUB a 1\r\nUNSUB 1 2\r\nUNSUB 1 0\r\n" + b"PUB a 1\r\nx\r\n" * 4
    ),
    "a limit that is no number": alone(QUIET + b"SUB a 1\r\nUNSUB 1 x\r\nPUB a 1\r\nx\r\n"),
    "a limit below 0": alone(QUIET + b"SUB a 1\r\nUNSUB 1 -1\r\nPUB a 1\r\nx\r\n"),
    "a limit of ten digits": alone(QUIET + b"SUB a 1\r\nUNSUB 1 1234567890\r\nPUB a 1\r\nx\r\n"),
    "no arguments": alone(QUIET + b"UNSUB\r\n"),
    "three arguments": alone(QUIET + b"UNSUB 1 2 3\r\n"),
    "within a batch of many": alone(
        QUIET + b"SUB a 1\r\nSUB a 2\r\nUNSUB 1 70\r\nUNSUB 2 3\r\n" + b"PUB a 1\r\nx\r\n" * 100
    ),
    "within a batch of many subjects": alone(
        QUIET
        + b"SUB > 1\r\nSUB a.1 2\r\nUNSUB 1 70\r\nUNSUB 2 3\r\n"
        + b"".join(b"PUB a.%d 1\r\nx\r\n" % (i % 5) for i in range(100))
    ),
    "with requests that ask once": (
        Step("s", QUIET + b"SUB svc 1\r\n"),
        Step("a", QUIET + b"SUB in.1 1\r\nUNSUB 1 1\r\nPUB svc in.1 1\r\nx\r\n"),
        Step("s", b"PUB in.1 1\r\ny\r\nPUB in.1 1\r\nz\r\n"),
        Step("a", b"PUB in.1 1\r\nz\r\n"),
    ),
}

ECHO: dict[str, Script] = {
    "client without echo": alone(
        DEAF + b"SUB foo 1\r\nSUB > 2\r\nPUB foo 1\r\nx\r\n" + b"PUB foo 1\r\nx\r\n" * 60
    ),
    "other clients receive messages of a client without echo": (
        Step("b", QUIET + b"SUB foo 1\r\n"),
        Step("a", DEAF + b"SUB foo 1\r\nPUB foo 1\r\nx\r\n"),
        Step("b", b"PUB foo 1\r\ny\r\n"),
    ),
    "messages that are not echoed are not counted": (
        Step("a", DEAF + b"SUB foo 1\r\nUNSUB 1 2\r\n" + b"PUB foo 1\r\nx\r\n" * 3),
        Step("b", QUIET + b"PUB foo 1\r\n1\r\nPUB foo 1\r\n2\r\nPUB foo 1\r\n3\r\n"),
    ),
    "echo is wanted again": alone(
        DEAF + b"SUB foo 1\r\nPUB foo 1\r\nx\r\n" + QUIET[:-3] + b',"echo":true}\r\n'
        b"SUB foo 1\r\nPUB foo 1\r\ny\r\n"
    ),
}

NOBODY: dict[str, Script] = {
    "a request that nobody answers": alone(
        ASKING + b"SUB in.1 7\r\nPUB y.y in.1 0\r\n\r\n", b"PUB y in.1 2\r\nab\r\n"
    ),
    "a request with headers that nobody answers": alone(
        ASKING + b"SUB in.* 7\r\nHPUB y in.1 18 18\r\n" + BLOCK + b"\r\n"
    ),
    "a request that somebody answers": (
        Step("s", QUIET + b"SUB y 1\r\n"),
        Step("a", ASKING + b"SUB in.1 7\r\nPUB y in.1 0\r\n\r\n"),
        Step("s", b"PUB in.1 2\r\nok\r\n"),
    ),
    "without a reply": alone(ASKING + b"SUB in.1 7\r\nPUB y 0\r\n\r\n"),
    "with a reply nobody listens to": alone(ASKING + b"SUB in.1 7\r\nPUB y in.2 0\r\n\r\n"),
    "with a reply another client listens to": (
        Step("b", ASKING + b"SUB in.1 7\r\n"),
        Step("a", ASKING + b"PUB y in.1 0\r\n\r\n"),
    ),
    "with a reply that a queue group listens to": alone(
        ASKING + b"SUB in.1 g 7\r\nPUB y in.1 0\r\n\r\n"
    ),
    "without having asked for it": alone(HEADERS + b"SUB in.1 7\r\nPUB y in.1 0\r\n\r\n"),
    "it is not counted": alone(
        ASKING + b"SUB in.1 7\r\nUNSUB 7 1\r\n" + b"PUB y in.1 0\r\n\r\n" * 2, b"PUB in.1 0\r\n\r\n"
    ),
    "the only listener is the one who asks": alone(
        ASKING + b"SUB y 1\r\nSUB in.1 7\r\nPUB y in.1 0\r\n\r\n"
    ),
    "the only listener is the one who asks, without echo": alone(
        ASKING[:-3] + b',"echo":false}\r\nSUB y 1\r\nSUB in.1 7\r\nPUB y in.1 0\r\n\r\n'
    ),
    "of a subject with empty words": alone(ASKING + b"SUB in.1 7\r\nPUB y..y in.1 0\r\n\r\n"),
    "many of one subject": alone(ASKING + b"SUB in.1 7\r\n" + b"PUB y in.1 0\r\n\r\n" * 60),
    "a verbose client": alone(
        b'CONNECT {"headers":true,"no_responders":true}\r\nSUB in.1 7\r\nPUB y in.1 0\r\n\r\n'
    ),
    "the subject is the reply": alone(ASKING + b"SUB a 1\r\nPUB b a 0\r\n\r\nPUB a a 0\r\n\r\n"),
}

BY_HAND: dict[str, Script] = {
    "the example flow": alone(
        b"CONNECT {}\n",
        b"PING\n",
        b"SUB foo.*.test 10\n",
        b"PUB foo.bar.test 5\nhello\r\n",
        b"UNSUB 10\n",
        b"PUB foo.bar.test 5\nhello\r\n",
    ),
    "the example flow with returns": alone(
        b"CONNECT {}\r\nPING\r\nSUB foo.*.test 10\r\nPUB foo.bar.test 5\r\nhello\r\nUNSUB 10\r\n"
    ),
    "splits behind a return": (
        Step("a", QUIET + b"SUB foo 1\r", settle=False),
        Step("a", b"\nPUB foo 1\r", settle=False),
        Step("a", b"\nx\r", settle=False),
        Step("a", b"\nPING\r", pings=0, settle=False),
        Step("a", b"\n", pings=1),
    ),
    "a number for a sid with a sign": alone(QUIET + b"SUB foo +5\r\nPUB foo 0\r\n\r\nUNSUB 5\r\n"),
}

GROUPS: dict[str, Script] = {
    "a group has one copy": alone(QUIET + b"SUB foo g 1\r\nPUB foo 1\r\nx\r\n" * 1),
    "members share": (
        Step("a", QUIET + b"SUB foo g 1\r\n"),
        Step("b", QUIET + b"SUB foo g 1\r\n"),
        Step("c", QUIET + b"".join(b"PUB foo 2\r\n%02d\r\n" % i for i in range(60))),
    ),
    "members share many of one kind": (
        Step("a", QUIET + b"SUB foo g 1\r\nSUB foo g 2\r\n"),
        Step("b", QUIET + b"SUB foo g 1\r\n"),
        Step("c", QUIET + b"PUB foo 2\r\nxx\r\n" * 90),
    ),
    "groups of another name and single subscriptions have their own": (
        Step("a", QUIET + b"SUB foo g 1\r\nSUB foo h 2\r\nSUB foo 3\r\nSUB foo.* g 4\r\n"),
        Step("b", QUIET + b"SUB foo g 1\r\nSUB * g 2\r\n"),
        Step("c", QUIET + b"".join(b"PUB foo 2\r\n%02d\r\n" % i for i in range(20))),
    ),
    "a member without echo is passed over": (
        Step("a", DEAF + b"SUB foo g 1\r\n"),
        Step("b", QUIET + b"SUB foo g 1\r\n"),
        Step("a", b"PUB foo 1\r\nx\r\n" * 30),
    ),
    "a member that leaves": (
        Step("a", QUIET + b"SUB foo g 1\r\n"),
        Step("b", QUIET + b"SUB foo g 1\r\n"),
        Step("a", b"UNSUB 1\r\n"),
        Step("c", QUIET + b"PUB foo 1\r\nx\r\n" * 30),
    ),
    "a member with a limit": (
        Step("a", QUIET + b"SUB foo g 1\r\nUNSUB 1 2\r\n"),
        Step("b", QUIET + b"SUB foo g 1\r\n"),
        Step("c", QUIET + b"PUB foo 1\r\nx\r\n" * 60),
    ),
    "a group alone answers": (
        Step("s", QUIET + b"SUB y g 1\r\n"),
        Step("a", ASKING + b"SUB in.1 7\r\nPUB y in.1 0\r\n\r\n"),
    ),
}
"""Scripts with queue groups. The choice of members is random, so only totals are compared."""

ALL: dict[str, Script] = {
    f"{topic}: {name}": script
    for topic, scripts in {
        "connecting": CONNECTING,
        "lexing": LEXING,
        "publishing": PUBLISHING,
        "headers": HEADER,
        "subscribing": SUBSCRIBING,
        "unsubscribing": UNSUBSCRIBING,
        "echo": ECHO,
        "no responders": NOBODY,
        "by hand": BY_HAND,
        "groups": GROUPS,
    }.items()
    for name, script in scripts.items()
}
