"""Tests of the C# client of protocol version 2, on .NET Core.

Most are C# methods in `client/`, which run in one process against one server. Tests that need
separate servers control programs of `client/` by their command line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    load_pem_private_key,
    pkcs12,
)
from cryptography.x509 import ObjectIdentifier, load_pem_x509_certificate
from cryptography.x509.oid import ExtendedKeyUsageOID

from load.ports import free_port
from tests.dotnet.sdk import DotnetSdk
from tests.support.certificates import CertificateAuthority
from tests.support.programs import Program, run_server, running_process

FOLDER = Path(__file__).parent / "client"
PROTOCOL = Path(__file__).parents[2] / "protocol"
CLIENT = PROTOCOL / "dotnet" / "SimpleBus.Client"
VECTORS = PROTOCOL / "vectors"
CSHARP_TESTS = [
    name
    for source in sorted(FOLDER.glob("*Tests.cs"))
    for name in re.findall(r"\[Test\]\s+public static (?:async )?Task (\w+)\(", source.read_text())
]

# Without the group, each worker compiles the programs.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("dotnet")]

ClientPrograms = Callable[..., contextlib.AbstractContextManager[Program]]


@pytest.fixture(scope="module")
def client_programs(dotnet_sdk: DotnetSdk) -> ClientPrograms:
    """Function that runs a command of `ClientTests` and kills it at the end of the block."""
    assembly = dotnet_sdk.build(FOLDER / "ClientTests.csproj")
    return lambda *arguments: running_process(
        dotnet_sdk.command(assembly, *(str(argument) for argument in arguments))
    )


@pytest.fixture(scope="module")
def csharp_results(client_programs: ClientPrograms) -> Iterator[dict[str, str]]:
    """Output lines of all C# tests, by the name of the test."""
    with run_server() as (_, url), client_programs("run", url, VECTORS) as tests:
        _, stdout, stderr = tests.wait()
        assert not stderr
        words = [line.split(" ", 2) for line in stdout.splitlines()]
        yield {name: " ".join([outcome, *error]) for outcome, name, *error in words}


@pytest.mark.parametrize("name", CSHARP_TESTS)
def test_csharp(csharp_results: dict[str, str], name: str) -> None:
    assert csharp_results.get(name) == "passed"


def test_no_task_of_the_client_fails_unobserved(csharp_results: dict[str, str]) -> None:
    assert csharp_results.keys() == set(CSHARP_TESTS)


# Documentation -----------------------------------------------------------------------------------

GUIDE = PROTOCOL / "guide" / "from-dotnet.md"
DOCUMENTED_PROJECT = """
<Project Sdk="Microsoft.NET.Sdk">
  <PropertyGroup>
    <OutputType>Exe</OutputType>
    <TargetFramework>netcoreapp3.1</TargetFramework>
    <LangVersion>8.0</LangVersion>
    <Nullable>enable</Nullable>
  </PropertyGroup>
  <ItemGroup>
    <FrameworkReference Include="Microsoft.AspNetCore.App" />
    <Reference Include="{library}" />
  </ItemGroup>
</Project>
"""


def csharp_blocks(page: Path) -> list[str]:
    """Return the C# blocks of a page, with the address from the variable `url`."""
    blocks = re.findall(r"```csharp\n(.*?)```", page.read_text(), re.DOTALL)
    return [block.replace('"simplebus://127.0.0.1:8888"', "Documented.Url") for block in blocks]


def documented_program() -> str:
    """Return a program whose argument selects a block of statements of README and guide."""
    blocks = csharp_blocks(CLIENT / "README.md") + csharp_blocks(GUIDE)
    declarations = [block for block in blocks if block.startswith("using ")]
    statements = [block for block in blocks if block not in declarations]
    usings = re.findall(r"^using [\w.]+;\n", "".join(declarations), re.MULTILINE)
    methods = [
        f"static async Task Block{number}() {{ {block} }}"
        for number, block in enumerate(statements)
    ]
    cases = [f"case {number}: await Block{number}(); break;" for number in range(len(statements))]
    return f"""
        {"".join(dict.fromkeys(usings))}
        {"".join(re.sub(r"^using [^;]+;", "", text, flags=re.M) for text in declarations)}
        public static class Documented
        {{
            public static string Url = "";
            {"".join(methods)}
            public static async Task Main(string[] arguments)
            {{
                Url = arguments[0];
                switch (int.Parse(arguments[1]))
                {{
                    {"".join(cases)}
                    case -1:
                        using (CancellationTokenSource stopping = new CancellationTokenSource())
                        {{
                            Task host = OrderHost.RunAsync(stopping.Token);
                            Console.ReadLine();
                            stopping.Cancel();
                            await host;
                        }}
                        break;
                }}
            }}
        }}
    """


def test_documented_programs_run(dotnet_sdk: DotnetSdk, tmp_path: Path) -> None:
    library = dotnet_sdk.build(CLIENT / "SimpleBus.Client.csproj")  # Warnings are errors.
    (tmp_path / "Program.cs").write_text(documented_program())
    (tmp_path / "Documented.csproj").write_text(DOCUMENTED_PROJECT.format(library=library))
    assembly = dotnet_sdk.build(tmp_path / "Documented.csproj")

    def run(block: int) -> tuple[int, str, str]:
        with running_process(dotnet_sdk.command(assembly, url, str(block))) as program:
            return program.wait()

    with run_server() as (_, url):
        assert run(0) == (0, "book\n", "")  # It leaves its message unacknowledged.
        assert run(1) == (0, "stored, durability Memory\n", "")
        assert run(2) == (0, "1 book \n1 book \n2 pen orders.eu\n3 ink orders.eu\n", "")
        assert run(3) == (0, f"{sum(range(10_000))}\n", "")
        assert run(4) == (0, "a book is 12 EUR\n", "")
        with running_process(dotnet_sdk.command(assembly, url, "-1")) as host:
            items = []
            while "Application started" not in host.read_line():
                pass
            assert run(1)[0] == 0
            while len(items) < 3:
                items += re.findall(r"shipped (\w+)", host.read_line())
            assert sorted(items) == ["book", "ink", "pen"]
            status, _, stderr = host.wait(b"\n")
            assert (status, stderr) == (0, "")


# Killed servers ----------------------------------------------------------------------------------


def test_publishes_once_while_the_server_is_killed(
    client_programs: ClientPrograms, tmp_path: Path
) -> None:
    count, kills = 60_000, 4
    server = ("--port", str(free_port()), "--data-dir", str(tmp_path), "--durability", "os")
    with contextlib.ExitStack() as programs:
        with run_server(*server) as (bus, url):
            publisher = programs.enter_context(client_programs("publish", url, "kills", count))
            consumer = programs.enter_context(client_programs("consume", url, "kills"))
            assert publisher.read_line() == consumer.read_line() == "connected"
            assert publisher.read_line().startswith("confirmed ")
            bus.process.kill()
        for _ in range(kills - 1):
            with run_server(*server) as (bus, _):
                assert publisher.read_line().startswith("confirmed ")
                bus.process.kill()
        with run_server(*server):
            status, published, log = publisher.wait()
            assert (status, published.splitlines()[-1]) == (0, f"published {count}"), log
            status, consumed, log = consumer.wait()
            assert (status, consumed) == (0, f"consumed {count}\ntwice 0\n"), log
    assert "connection lost" in log


# Connecting --------------------------------------------------------------------------------------


USERS = """
[[users]]
name = "till"
token = "a secret of the till"

[[users]]
name = "shop"
password = "a secret of the shop"
"""


def connect(client_programs: ClientPrograms, url: str, **options: object) -> str:
    """Return what `ClientTests connect` prints: the confirm, or the error."""
    words = [f"{name}={value}" for name, value in options.items()]
    with client_programs("connect", url, *words) as program:
        status, stdout, stderr = program.wait()
        assert status == 0, stderr
        return stdout.strip()


def test_authenticates_by_password_or_token(
    client_programs: ClientPrograms, tmp_path: Path
) -> None:
    users = tmp_path / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    with run_server("--users", str(users)) as (_, url):
        right = {"user": "shop", "password": "a secret of the shop"}
        assert connect(client_programs, url, **right) == "confirmed"
        assert connect(client_programs, url, token="a secret of the till") == "confirmed"
        assert connect(client_programs, url, **right | {"password": "x"}) == "lost unauthorized"
        assert connect(client_programs, url) == "lost unauthorized"


def write_pfx(certificate: Path, key: Path, target: Path) -> Path:
    """Write a certificate with its key as .NET reads it."""
    target.write_bytes(
        pkcs12.serialize_key_and_certificates(
            b"client",
            load_pem_private_key(key.read_bytes(), None),  # type: ignore[arg-type]
            load_pem_x509_certificate(certificate.read_bytes()),
            None,
            BestAvailableEncryption(b"pfx"),
        )
    )
    return target


def test_connects_by_tls_with_a_client_certificate(
    client_programs: ClientPrograms, tmp_path: Path
) -> None:
    authority = CertificateAuthority(tmp_path)
    server, client = authority.issue("bus.example"), authority.issue("client")
    other_authority = CertificateAuthority(tmp_path, "other")
    pfx = write_pfx(client.cert, client.key, tmp_path / "client.pfx")
    tls = ("--tls-cert", server.cert, "--tls-key", server.key, "--tls-ca", authority.path)
    with run_server(*map(str, tls), "--tls-verify") as (_, url):
        secure = url.replace("simplebus://", "simplebuss://")
        right = {"ca": authority.path, "pfx": pfx, "server": "bus.example"}
        assert connect(client_programs, secure, **right) == "confirmed"
        assert connect(client_programs, secure, **right | {"server": "x.example"}) == "lost"
        assert connect(client_programs, secure, **right | {"ca": other_authority.path}) == "lost"
        del right["pfx"]
        assert connect(client_programs, secure, **right).startswith("lost")
        assert connect(client_programs, url) == "lost tls_handshake"


@pytest.mark.parametrize(
    ("usage", "outcome"),
    [(ExtendedKeyUsageOID.SERVER_AUTH, "confirmed"), (ExtendedKeyUsageOID.CLIENT_AUTH, "lost")],
)
def test_trusts_no_client_certificate_as_a_server(
    client_programs: ClientPrograms,
    tmp_path: Path,
    usage: ObjectIdentifier,
    outcome: str,
) -> None:
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue("bus.example", usage=usage)
    with run_server("--tls-cert", str(pair.cert), "--tls-key", str(pair.key)) as (_, url):
        secure = url.replace("simplebus://", "simplebuss://")
        assert connect(client_programs, secure, ca=authority.path, server="bus.example") == outcome
