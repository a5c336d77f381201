"""Dialogues with servers that require authentication or have low limits.

Each server is configured twice: for nats-server and for simplebus.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.limits import NatsLimits
from tests.nats.differential.compare import Script, Step
from tests.nats.differential.dialogues import BLOCK, QUIET


@dataclass(frozen=True, slots=True)
class ServerCase:
    """Server configuration with its dialogues."""

    config: str
    """For the reference server."""
    limits: NatsLimits
    auth: Users
    scripts: dict[str, Script]


_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


def nkey(key: Ed25519PrivateKey) -> str:
    """Return the public nkey of a private key."""
    raw = bytes([20 << 3]) + key.public_key().public_bytes(
        serialization.Encoding.Raw, serialization.PublicFormat.Raw
    )
    raw += binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


def hello(user: str = "", password: str = "p", **options: object) -> bytes:
    """Return the CONNECT of a client without verbose output."""
    connect_options: dict[str, object] = {"verbose": False, "pedantic": False, "headers": True}
    if user:
        connect_options |= {"user": user, "pass": password}
    return b"CONNECT " + json.dumps(connect_options | options).encode() + b"\r\n"


def signed(key: Ed25519PrivateKey, encode: Callable[[bytes], bytes]) -> Callable[[str], bytes]:
    """Return a function that signs the nonce with this key and returns CONNECT."""

    def sign_nonce(nonce: str) -> bytes:
        signature = encode(key.sign(nonce.encode())).decode()
        return hello(nkey=nkey(_KEY), sig=signature) + b"PING\r\n"

    return sign_nonce


def raw(*data: bytes | Callable[[str], bytes], pings: int = -1) -> Script:
    return tuple(Step("a", data_part, pings) for data_part in data)


def listens(user: str, *subscriptions: bytes, pubs: bytes) -> Script:
    """Return a script in which this user subscribes and an unrestricted user publishes."""
    subs = b"".join(b"SUB %s %d\r\n" % (s, sid) for sid, s in enumerate(subscriptions))
    return (Step("a", hello(user) + subs), Step("b", hello("all") + pub(*pubs.split())))


def pub(*subjects: bytes) -> bytes:
    return b"".join(b"PUB %s 1\r\nx\r\n" % subject for subject in subjects)


def each(verb: bytes, subjects: bytes) -> bytes:
    if verb == b"PUB":
        return pub(*subjects.split())
    return b"".join(b"SUB %s %d\r\n" % (s, n) for n, s in enumerate(subjects.split(b",")))


_SUBSCRIBE_ALLOW = ("foo.*", "bar.>", "*.*.*", "one.two", "q.* grp.*", "qq v1", "q2 >")
_SUBSCRIBE_DENY = ("foo.bar", "bar.x.>", "bar.*.z", "q.d grp.x", "bar.q dq", "*.deny")
_ODD = (
    "quo\"te back\\slash apo'strophe café 日本 \u00ad \u200b \u2028 \ufeff \ufffd".encode()
    + " \U0001f600 \U000e0001 \U0010ffff a\u0080 a\u00a0b ".encode()
    + b"\xe9 a\xff.\xc3 \xed\xa0\x80 \xf0\x9f\x98 a\x00\x01\x07\x08\x0c\x1b\x7f"
)
"""Subjects that nats-server quotes with escapes, and others."""


def _listed(items: tuple[str, ...]) -> str:
    return json.dumps(list(items))


USERS = ServerCase(
    config=f"""
authorization {{
  timeout: 5
  users = [
    {{user: all, password: p}}
    {{user: other, password: "q p"}}
    {{user: publisher, password: p, permissions: {{
        publish: {{allow: ["foo.*", "bar.>", "#.x"], deny: ["foo.bar", "bar.*.deny"]}}
        subscribe: "in.>" }} }}
    {{user: subscriber, password: p, permissions: {{
        publish: {{deny: ">"}}
        subscribe: {{allow: {_listed(_SUBSCRIBE_ALLOW)}, deny: {_listed(_SUBSCRIBE_DENY)}}} }} }}
    {{user: denied, password: p, permissions: {{ subscribe: {{deny: ["a.x", "a.b.>", "*.y"]}} }} }}
    {{user: answerer, password: p, permissions: {{
        subscribe: "svc.>", allow_responses: {{max: 2, expires: "1m"}} }} }}
    {{user: answers, password: p, permissions: {{
        publish: "x", subscribe: "svc.>", allow_responses: true }} }}
    {{user: overruled, password: p, permissions: {{ subscribe: {{deny: ["a", "a q"]}} }} }}
    {{user: empty, password: p, permissions: {{publish: {{allow: []}}, subscribe: {{deny: []}} }} }}
    {{nkey: {nkey(_KEY)} }}
  ]
}}
""",
    limits=NatsLimits(),
    auth=Users(
        users=(
            User("all", "p"),
            User("other", "q p"),
            User(
                "publisher",
                "p",
                subject_permissions=SubjectPermissions(
                    publish_allow=("foo.*", "bar.>", "#.x"),
                    publish_deny=("foo.bar", "bar.*.deny"),
                    subscribe_allow=("in.>",),
                ),
            ),
            User(
                "subscriber",
                "p",
                subject_permissions=SubjectPermissions(
                    publish_deny=(">",),
                    subscribe_allow=_SUBSCRIBE_ALLOW,
                    subscribe_deny=_SUBSCRIBE_DENY,
                ),
            ),
            User(
                "denied",
                "p",
                subject_permissions=SubjectPermissions(subscribe_deny=("a.x", "a.b.>", "*.y")),
            ),
            User(
                "answerer",
                "p",
                subject_permissions=SubjectPermissions(
                    subscribe_allow=("svc.>",),
                    responses=ResponsePermission(max_responses=2, expires_seconds=60),
                ),
            ),
            User(
                "answers",
                "p",
                subject_permissions=SubjectPermissions(
                    publish_allow=("x",), subscribe_allow=("svc.>",), responses=ResponsePermission()
                ),
            ),
            User(
                "overruled",
                "p",
                subject_permissions=SubjectPermissions(subscribe_deny=("a", "a q")),
            ),
            User("empty", "p", subject_permissions=SubjectPermissions()),
            User(nkey(_KEY), nkey=nkey(_KEY)),
        )
    ),
    scripts={
        "user and password": raw(hello("all") + b"PING\r\n"),
        "a verbose user": raw(hello("all", verbose=True) + b"PING\r\n"),
        "a password with a blank": raw(hello("other", "q p")),
        "a wrong password": raw(hello("all", "x")),
        "the beginning of a password": raw(hello("other", "q ")),
        "no password": raw(hello("all", "")),
        "a user that is not there": raw(hello("nobody")),
        "no user": raw(hello()),
        "a token where users are asked for": raw(hello(auth_token="p")),
        "a ping before connect": raw(b"PING\r\n", pings=0),
        "a pong before connect": raw(b"PONG\r\n"),
        "a subscription before connect": raw(b"SUB a 1\r\n"),
        "a message before connect": raw(b"PUB a 1\r\nx\r\n"),
        "an unsubscription before connect": raw(b"UNSUB 1\r\n"),
        "ok before connect": raw(b"+OK\r\n" + hello("all")),
        "an error before connect": raw(b"-ERR 'x'\r\n"),
        "info before connect": raw(b"INFO {}\r\n" + hello("all")),
        "an unknown word before connect": raw(b"HELLO\r\n"),
        "an empty line before connect": raw(b"\r\n"),
        "bad options before all": raw(b"CONNECT {\r\n"),
        "protocol 2 and a user": raw(hello("all", protocol=2)),
        "no responders without headers and a user": raw(
            hello("all", headers=False, no_responders=True)
        ),
        "protocol 2 and a wrong password": raw(hello("all", "x", protocol=2)),
        "no responders without headers and a wrong password": raw(
            hello("all", "x", headers=False, no_responders=True)
        ),
        "protocol 2, an account and a user": raw(hello("all", protocol=2, account="x")),
        "no responders without headers and an account": raw(
            hello("all", headers=False, no_responders=True, account="x")
        ),
        "protocol 2 and no responders without headers": raw(
            hello("all", headers=False, no_responders=True, protocol=2)
        ),
        "a user and a jwt": raw(hello("all", jwt="x")),
        "a jwt alone": raw(hello(jwt="x")),
        "a user and a token": raw(hello("all", auth_token="x")),
        "protocol 1 in a second connect": raw(
            hello("all") + b"PING\r\n", hello("all", protocol=1) + b"PING\r\n"
        ),
        "protocol 1 twice": raw(
            hello("all", protocol=1) + b"PING\r\n", hello("all", protocol=1) + b"PING\r\n"
        ),
        "a sid that is there already, of a denied subject": raw(
            hello("subscriber", verbose=True) + b"SUB foo.x 1\r\nSUB a 1\r\nUNSUB 1\r\n"
        ),
        "protocol 1 and a user": raw(hello("all", protocol=1) + b"PING\r\n"),
        "an account and a user": raw(hello("all", account="x")),
        "a second connect of the same user": raw(
            hello("all") + b"SUB a 1\r\n" + hello("all") + pub(b"a")
        ),
        "a second connect of another user": raw(
            hello("all") + b"SUB a 1\r\n", hello("publisher") + b"SUB a 1\r\n" + pub(b"a", b"foo.x")
        ),
        "a second connect with a wrong password": raw(hello("all"), hello("all", "x")),
        "a second connect without a password": raw(hello("all"), b"CONNECT {}\r\nPING\r\n"),
        "a key and its signature": raw(
            signed(_KEY, lambda s: base64.urlsafe_b64encode(s).rstrip(b"="))
        ),
        "a signature in the plain alphabet": raw(signed(_KEY, base64.b64encode)),
        "a signature of another key": raw(signed(_OTHER_KEY, base64.b64encode), pings=0),
        "a signature of something else": raw(
            hello(nkey=nkey(_KEY), sig=base64.b64encode(_KEY.sign(b"x")).decode())
        ),
        "a key without a signature": raw(hello(nkey=nkey(_KEY))),
        "a signature that is no base 64": raw(hello(nkey=nkey(_KEY), sig="!")),
        "a key that is not there": raw(hello(nkey=nkey(_OTHER_KEY), sig="x")),
        "a key that is none": raw(hello(nkey="U", sig="x")),
        "a user beside a key": raw(hello("all", nkey=nkey(_OTHER_KEY))),
        "publishing is allowed and denied": raw(
            hello("publisher", verbose=True)
            + each(b"PUB", b"foo.x foo.bar foo bar.a.b bar.a.deny bar.deny a a.x #.x b.#.x")
        ),
        "publishing of odd subjects": raw(
            hello("publisher") + each(b"PUB", b"foo.* foo.> > bar..a foo. .. bar.*")
        ),
        "publishing of odd subjects, pedantic": raw(
            hello("publisher", pedantic=True) + each(b"PUB", b"foo.* > bar..a bar.*")
        ),
        "what is denied is shown with escapes": raw(
            hello("publisher") + each(b"PUB", _ODD),
            hello("subscriber") + each(b"SUB", b",".join(_ODD.split())),
            each(b"SUB", b"foo.bar q\"\\q,foo.bar \xe9'\x01"),
        ),
        "many that are denied": raw(hello("publisher") + pub(*[b"foo.bar"] * 20)),
        "many of which some are denied": raw(
            hello("publisher") + pub(*[b"foo.bar", b"foo.x", b"bar.1.2", b"a"] * 20)
        ),
        "what is denied reaches nobody": (
            Step("b", hello("all") + b"SUB > 1\r\n"),
            Step("a", hello("publisher") + pub(*[b"foo.bar", b"foo.x", b"bar.1.2", b"a"] * 20)),
        ),
        "what is denied with headers and a reply": raw(
            hello("publisher") + b"HPUB foo.bar in.1 18 18\r\n" + BLOCK + b"\r\n"
        ),
        "what is denied is not answered by nobody": raw(
            hello("publisher", no_responders=True)
            + b"SUB in.1 1\r\nPUB foo.bar in.1 0\r\n\r\nPUB foo.x in.1 0\r\n\r\n"
        ),
        "a publisher who may not subscribe": raw(
            hello("publisher", verbose=True) + each(b"SUB", b"in.a,a,>,in.>,in")
        ),
        "a reply one may not publish to": raw(hello("publisher") + b"PUB foo.x zz 1\r\nx\r\n"),
        "a reply that the server keeps for itself": raw(
            hello("publisher", verbose=True) + b"PUB foo.x _R_.a 1\r\nx\r\nPUB a _R_.a 0\r\n\r\n"
        ),
        "subscribing is allowed and denied": raw(
            hello("subscriber", verbose=True)
            + each(b"SUB", b"foo.x,foo.bar,foo.*,foo,bar.x.y,bar.a.z,bar.a.b,bar.a.*,bar.*.z,bar.>")
        ),
        "subscribing with queues": raw(
            hello("subscriber")
            + each(b"SUB", b"q.a,q.a grp.1,q.a other,q.d grp.x,q.d grp.y,q.* grp.1,q.* grp.x")
            + each(b"SUB", b"qq v1,qq v2,q2 a.b,foo.x g,bar.q dq,bar.q dq2,bar.q,bar.* dq")
        ),
        "subscribing with wildcards": raw(
            hello("subscriber")
            + each(b"SUB", b"one.two,one.*,*.two,*.*,*.*.*,*.*.x,a.b.c,foo.*.*,*.deny,x.*.deny")
        ),
        "subscribing to subjects that are none": raw(
            hello("subscriber", verbose=True) + each(b"SUB", b"a..b,foo.>.a,foo.,foo.a.a.a.a")
        ),
        "subscribing to more words than allowed": raw(
            hello("subscriber") + each(b"SUB", b"foo.>") + pub(b"foo.x", b"foo.x.y")
        ),
        "a queue that is not denied of what is": raw(
            hello("overruled") + each(b"SUB", b"a,a q,a other")
        ),
        "what was refused is not there": (
            Step("a", hello("subscriber") + b"SUB foo.bar 1\r\nSUB foo.x 1\r\n"),
            Step("b", hello("all") + pub(b"foo.bar", b"foo.x")),
        ),
        "wildcards are filtered": listens(
            "subscriber",
            b"bar.>",
            b"foo.*",
            b"bar.* g",
            b"*.*.*",
            pubs=b"bar.x.y bar.a.z bar.a.b foo.bar bar.q foo.x x.deny a.b.c bar.deny",
        ),
        "wildcards of a queue are filtered": listens(
            "subscriber", b"bar.* dq", pubs=b"bar.q bar.y bar.deny"
        ),
        "everything is filtered": listens("denied", b">", pubs=b"a.x a.y a.z a.b a.b.c b.x b.y"),
        "two words are filtered": listens(
            "denied", b"*.*", b"*.x", b"a.*", pubs=b"a.x a.y a.z a.b a.b.c b.x b.y"
        ),
        "three words are filtered": listens(
            "denied", b"a.*.*", b"a.>", b"*.b.>", pubs=b"a.x a.b.c a.b.d.e a.c.d c.b.d"
        ),
        "many that are filtered": listens("denied", b">", pubs=b"a.x b.x a.b.c a.c.d " * 20),
        "many of one subject that are filtered": listens("denied", b">", pubs=b"a.x " * 60),
        "a member that may not have it is passed over": (
            Step("a", hello("denied") + b"SUB a.* g 1\r\n"),
            Step("c", hello("all") + b"SUB a.* g 1\r\n"),
            Step("b", hello("all") + pub(*[b"a.x"] * 20)),
        ),
        "who may answer": (
            Step("a", hello("answerer") + b"SUB svc.* 1\r\n" + pub(b"x", b"in.1")),
            Step("b", hello("all") + b"SUB in.> 1\r\nPUB svc.a in.1 1\r\n1\r\n"),
            Step("a", pub(b"in.1", b"in.1", b"in.1", b"in.2")),
            Step("b", b"PUB svc.a in.2 1\r\n1\r\nPUB svc.b in.3 1\r\n2\r\n"),
            Step("a", pub(b"in.2", b"in.3", b"in.2", b"in.3", b"in.2", b"in.3")),
        ),
        "who may answer once": (
            Step("a", hello("answers") + b"SUB svc.* 1\r\n" + pub(b"x", b"in.1")),
            Step("b", hello("all") + b"SUB in.> 1\r\nPUB svc.a in.1 1\r\n1\r\n"),
            Step("a", pub(b"in.1", b"in.1")),
            Step("b", b"PUB svc.a in.1 1\r\n1\r\n"),
            Step("a", pub(b"in.1", b"x")),
        ),
        "who may answer many": (
            Step("a", hello("answers") + b"SUB svc.* 1\r\n"),
            Step(
                "b",
                hello("all")
                + b"SUB in.> 1\r\n"
                + b"".join(b"PUB svc.a in.%d 1\r\n1\r\n" % n for n in range(30)),
            ),
            Step("a", pub(*[b"in.%d" % n for n in range(32)])),
            Step("a", pub(*[b"in.%d" % n for n in range(3)])),
        ),
        "lists without anything": raw(hello("empty") + b"SUB a 1\r\n" + pub(b"a")),
    },
)

TOKEN = ServerCase(
    config='authorization { token: "s3cr3t", timeout: 5 }',
    limits=NatsLimits(),
    auth=Users([User("token", token="s3cr3t")]),
    scripts={
        "the token": raw(hello(auth_token="s3cr3t") + b"PING\r\n"),
        "another token": raw(hello(auth_token="secret")),
        "the beginning of the token": raw(hello(auth_token="s3")),
        "no token": raw(hello()),
        "the token as a password": raw(hello("x", "s3cr3t")),
        "the token as a user": raw(hello("s3cr3t", "")),
        "the token and a user": raw(hello("x", "y", auth_token="s3cr3t")),
        "a token that is a number": raw(b'CONNECT {"auth_token":5}\r\n'),
    },
)

SILENT = ServerCase(
    config="""
authorization { timeout: 5, users = [
  {user: guest, password: g, permissions: {publish: "open.>", subscribe: "open.>"}}
  {user: all, password: p}
]}
no_auth_user: guest
max_payload: 32
max_control_line: 128
max_subscriptions: 3
max_pending: 1MB
""",
    limits=NatsLimits(max_payload=32, max_control_line=128, max_subs=3),
    auth=Users(
        users=(
            User(
                "guest",
                "g",
                subject_permissions=SubjectPermissions(
                    publish_allow=("open.>",), subscribe_allow=("open.>",)
                ),
            ),
            User("all", "p"),
        ),
        anonymous="guest",
    ),
    scripts={
        "a guest says connect": raw(
            QUIET + b"SUB open.> 1\r\nSUB a 2\r\n" + pub(b"open.a", b"a") + b"PING\r\n"
        ),
        "a guest does not say connect": raw(b"SUB open.> 1\r\nSUB a 2\r\n" + pub(b"open.a", b"a")),
        "a guest says ping first": raw(b"PING\r\nSUB a 1\r\n"),
        "a guest with a wrong password": raw(hello("all", "x")),
        "a guest with a wrong token": raw(hello(auth_token="x")),
        "a guest who says who it is later": raw(
            b"SUB open.> 1\r\n", hello("all") + b"SUB a 2\r\n" + pub(b"a", b"open.a")
        ),
        "a user says who it is": raw(hello("all") + b"SUB a 2\r\n" + pub(b"a")),
        "a payload as long as allowed": raw(
            hello("all") + b"SUB a 1\r\nPUB a 32\r\n" + b"x" * 32 + b"\r\n"
        ),
        "a payload longer than allowed": raw(hello("all") + b"PUB a 33\r\n"),
        "headers longer than allowed": raw(hello("all") + b"HPUB a 18 33\r\n"),
        "a payload longer than allowed behind others": raw(
            hello("all") + b"SUB a 1\r\n" + pub(b"a", b"a") + b"PUB a 33\r\n" + b"x" * 33 + b"\r\n"
        ),
        "a line as long as allowed": raw(hello("all") + b"SUB " + b"a" * 122 + b" 1\r\n"),
        "a line longer than allowed": raw(hello("all") + b"SUB " + b"a" * 123 + b" 12\r\n"),
        "a line longer than allowed in pieces": (
            Step("a", hello("all") + b"SUB " + b"a" * 60, settle=False),
            Step("a", b"a" * 200 + b" 1\r\n"),
        ),
        "the last subscription allowed": raw(
            hello("all") + each(b"SUB", b"a,b,c") + pub(b"a", b"b", b"c")
        ),
        "more subscriptions than allowed": raw(
            hello("all", verbose=True) + each(b"SUB", b"a,b,c,d,e") + pub(b"c", b"d"),
            b"UNSUB 0\r\nSUB d 7\r\nSUB e 8\r\n" + pub(b"d"),
        ),
        "a sid that is there when there are as many as allowed": raw(
            hello("all", verbose=True) + each(b"SUB", b"a,b,c") + b"SUB x 1\r\n"
        ),
        "a subject that is none when there are as many as allowed": raw(
            hello("all", verbose=True) + each(b"SUB", b"a,b,c") + b"SUB x..y 7\r\n"
        ),
        "a subscription that is denied when there are as many as allowed": raw(
            QUIET + each(b"SUB", b"open.1,open.2,open.3,a")
        ),
        "subscriptions that are refused do not count": raw(
            QUIET + each(b"SUB", b"a,b,c,d,open.1,open.2,open.3,open.4")
        ),
    },
)

SERVER_CASES = {"users": USERS, "token": TOKEN, "guests": SILENT}
