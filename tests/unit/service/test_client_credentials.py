"""How a client and the commands say who they are and whom they trust."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dragoman.cli.credentials import add_credentials_arguments, check_no_credentials, credentials_of
from dragoman.cli.main import main
from dragoman.client import Client
from dragoman.client_credentials import ClientCredentials
from dragoman.errors import ConfigError
from dragoman.settings import TOKEN_VARIABLE, read_settings


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_credentials_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_without_options_it_is_in_the_clear_and_without_a_token():
    """As for a server of one's own machine."""
    credentials = credentials_of(parsed())
    assert credentials == ClientCredentials()
    assert not credentials.encrypted and credentials.metadata == ()


@pytest.mark.parametrize("arguments", [["--tls"], ["--tls-ca", "a"], ["--tls-server-name", "a"]])
def test_each_option_of_tls_means_tls(arguments):
    """Nobody who names an authority means to speak in the clear."""
    assert credentials_of(parsed(*arguments)).encrypted


def test_a_token_comes_from_a_file_or_else_from_the_environment(tmp_path, monkeypatch):
    """The file wins. It is sent as a bearer token, and shown nowhere."""
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-environment")
    assert credentials_of(parsed()).metadata == (("authorization", "Bearer of-the-environment"),)
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    credentials = credentials_of(parsed("--token-file", str(file)))
    assert credentials.metadata == (("authorization", "Bearer of-the-file"),)
    assert "of-the-file" not in repr(credentials)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"\xff\xfe", "it is no text"),
        (b"a b", "visible ASCII"),
    ],
)
def test_a_file_without_a_usable_token_is_a_clear_error(tmp_path, content, words):
    """Nothing is sent then."""
    file: Path = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        credentials_of(parsed("--token-file", str(file)))


def test_half_of_a_pair_and_files_that_are_none_are_refused_before_anything_is_dialled(tmp_path):
    """The message names the file."""
    with pytest.raises(ConfigError, match="belong together"):
        credentials_of(parsed("--tls-certificate", "a.pem"))
    with pytest.raises(ConfigError, match=r"none\.pem cannot be read"):
        Client("localhost:1", credentials=ClientCredentials(ca=str(tmp_path / "none.pem")))


def test_options_of_a_connection_without_a_server_are_refused(capsys):
    """A model that runs here has no connection."""
    check_no_credentials(parsed())
    with pytest.raises(ConfigError, match="--tls-ca, --tls-server-name was given without --target"):
        check_no_credentials(parsed("--tls-ca", "a", "--tls-server-name", "b"))
    assert main(["generate", "--tls", "abc"]) == 2
    assert "--tls was given without --target" in capsys.readouterr().err


def test_a_shell_that_holds_a_token_can_start_a_server_too():
    """It is no setting of the server, and not taken for a misspelt one."""
    read_settings(None, {TOKEN_VARIABLE: "of-the-environment"}, {})
