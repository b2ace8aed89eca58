"""TLS and mutual TLS, and certificates that are renewed while the server runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dragoman.cli.main import main
from dragoman.client import AsyncClient, Client
from dragoman.client_credentials import ClientCredentials
from dragoman.config import TlsConfig
from dragoman.errors import ConfigError, NotReadyError
from dragoman.retries import NO_RETRIES

NAMES = ("server", "renewed", "caller", "stranger")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of certificates, NAME.pem and NAME.key, each its own authority; all say they are 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    for name in NAMES:
        arguments = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:dragoman.test"]
        files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
        subprocess.run([openssl, "req", *arguments.split(), *names, *files], check=True, capture_output=True)
    return folder


@pytest.fixture
def tls(certificates: Path, tmp_path: Path) -> TlsConfig:
    """The server's files, free to be changed."""
    for suffix in ("pem", "key"):
        shutil.copy(certificates / f"server.{suffix}", tmp_path / f"tls.{suffix}")
    return TlsConfig(str(tmp_path / "tls.pem"), str(tmp_path / "tls.key"))


def trusting(certificates: Path, name: str, own: str = "") -> ClientCredentials:
    """Those of a caller who trusts the one, and may have a certificate of its own."""
    pair = [str(certificates / f"{own}.{suffix}") if own else "" for suffix in ("pem", "key")]
    return ClientCredentials(ca=str(certificates / f"{name}.pem"), certificate=pair[0], key=pair[1])


async def answers(port: int, credentials: ClientCredentials) -> bool:
    """Whether a new connection gets an answer."""
    async with AsyncClient(f"127.0.0.1:{port}", credentials=credentials, retries=NO_RETRIES) as client:
        try:
            return (await client.generate("abc", timeout=10)).text == "abc"
        except NotReadyError:
            return False


async def test_a_server_with_a_certificate_speaks_tls_alone(start_server, certificates, tls):
    """To those who trust it; neither to those who do not, nor in the clear."""
    running = await start_server(tls=tls, credentials=trusting(certificates, "server"))
    assert (await running.client.generate("abc")).text == "abc"
    assert not await answers(running.server.port, trusting(certificates, "stranger"))
    assert not await answers(running.server.port, ClientCredentials())
    assert (await running.client.generate("abc")).text == "abc"


async def test_with_mutual_tls_callers_need_a_certificate_too(start_server, certificates, tls):
    """One by an authority that the server trusts."""
    config = TlsConfig(tls.certificate, tls.key, client_ca=str(certificates / "caller.pem"))
    running = await start_server(tls=config, credentials=trusting(certificates, "server", own="caller"))
    assert (await running.client.generate("abc")).text == "abc"
    assert not await answers(running.server.port, trusting(certificates, "server", own="stranger"))
    assert not await answers(running.server.port, trusting(certificates, "server"))


def renew(tls: TlsConfig, certificates: Path, name: str, when: int, *suffixes: str) -> None:
    """Put other files in their place, as certificate managers do."""
    for suffix in suffixes:
        target = Path(tls.certificate if suffix == "pem" else tls.key)
        new = target.with_suffix(".new")
        shutil.copy(certificates / f"{name}.{suffix}", new)
        os.utime(new, ns=(when, when))
        new.replace(target)


async def test_a_renewed_certificate_is_used_for_new_connections_without_a_restart(start_server, certificates, tls):
    """Those that exist go on, those who trust the old one alone are no longer served."""
    running = await start_server(tls=tls, credentials=trusting(certificates, "server"))
    assert (await running.client.generate("abc")).text == "abc"
    renew(tls, certificates, "renewed", 1, "pem", "key")
    assert await answers(running.server.port, trusting(certificates, "renewed"))
    assert not await answers(running.server.port, trusting(certificates, "server"))
    assert (await running.client.generate("abc")).text == "abc"  # on the connection of before


async def test_a_bad_renewal_keeps_the_old_certificate_and_is_logged_once(start_server, certificates, tls, caplog):
    """A certificate whose key is still the old one is not used; when the key comes too, both are."""
    running = await start_server(tls=tls, credentials=trusting(certificates, "server"))
    renew(tls, certificates, "renewed", 1, "pem")
    for _ in range(2):
        assert await answers(running.server.port, trusting(certificates, "server"))
    bad = [record for record in caplog.records if "the old ones stay in force" in record.getMessage()]
    assert len(bad) == 1 and tls.certificate in bad[0].getMessage()
    renew(tls, certificates, "renewed", 2, "key")
    assert await answers(running.server.port, trusting(certificates, "renewed"))


@pytest.mark.parametrize(
    ("certificate", "key", "client_ca", "words"),
    [
        ("server.pem", "caller.key", "", ["KEY_VALUES_MISMATCH", "its own private key"]),
        ("server.key", "server.key", "", ["cannot be used", "PEM"]),
        ("none.pem", "server.key", "", ["none.pem cannot be read: No such file"]),
        ("server.pem", "server.key", "server.key", ["client_ca", "holds no certificate in PEM form"]),
    ],
)
async def test_files_that_cannot_be_used_are_refused_before_anything_is_served(
    start_server, certificates, certificate, key, client_ca, words
):
    """The message names the file and what is wrong with it."""
    paths = [str(certificates / name) if name else "" for name in (certificate, key, client_ca)]
    with pytest.raises(ConfigError) as caught:
        await start_server(tls=TlsConfig(*paths))
    for word in words:
        assert word in str(caught.value)


def test_a_key_with_a_password_is_refused_without_asking_for_it(certificates, tmp_path):
    """Nobody sits at the terminal of a server."""
    key = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-v2", "aes256", "-passout", "pass:secret"]
    subprocess.run([*command, "-in", certificates / "server.key", "-out", key], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="not encrypted"):
        Client("localhost:1", credentials=ClientCredentials(certificate=str(certificates / "server.pem"), key=str(key)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"certificate": "a.pem"}, "certificate and no key"),
        ({"key": "a.key"}, "key and no certificate"),
        ({"client_ca": "a.pem"}, "client_ca and no certificate"),
    ],
)
def test_settings_of_tls_that_make_no_sense_are_refused(settings, words):
    """Half of a pair would mean a server in the clear that its owner believes to be safe."""
    with pytest.raises(ConfigError, match=words):
        TlsConfig(**settings)


async def test_the_commands_speak_tls_and_send_a_token(start_server, certificates, tls, monkeypatch, capsys):
    """The files by options, the token by a variable, which a list of processes does not show."""
    running = await start_server(tls=tls, credentials=trusting(certificates, "server"))
    monkeypatch.setenv("DRAGOMAN_TOKEN", "not-asked-for-0123456789")
    port, ca = running.server.port, str(certificates / "server.pem")
    secure = ["--tls-ca", ca]
    assert await asyncio.to_thread(main, ["generate", "--target", f"127.0.0.1:{port}", *secure, "abc"]) == 0
    assert capsys.readouterr().out == "abc\n"
    named = ["health", "--address", f"localhost:{port}", *secure, "--tls-server-name", "dragoman.test"]
    assert await asyncio.to_thread(main, named) == 0
    assert await asyncio.to_thread(main, ["health", "--address", f"127.0.0.1:{port}"]) == 1
