"""Targets of one server, and of several."""

from __future__ import annotations

import json

import pytest

from dragoman.addresses import channel_target
from dragoman.client import Client
from dragoman.client_credentials import ClientCredentials
from dragoman.errors import ConfigError


@pytest.mark.parametrize(
    ("target", "dialled"),
    [
        ("localhost:50051", "localhost:50051"),
        ("dns:///translate.example:50051", "dns:///translate.example:50051"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("10.0.0.1:50051,10.0.0.2:50052", "ipv4:10.0.0.1:50051,10.0.0.2:50052"),
        ("[::1]:50051,[fe80::2]:50052", "ipv6:[::1]:50051,[fe80::2]:50052"),
    ],
)
def test_every_target_is_shared_by_its_addresses(target: str, dialled: str) -> None:
    """Those that it names, and those that DNS has for it."""
    found, options = channel_target(target)
    assert found == dialled
    assert json.loads(dict(options)["grpc.service_config"]) == {"loadBalancingConfig": [{"round_robin": {}}]}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("a.example:1,b.example:1", "address 'a.example:1'.* one name under which DNS has all of them"),
        ("127.0.0.1:1,127.0.0.1", "address '127.0.0.1'"),
        ("127.0.0.1:1,", "address ''"),
        ("127.0.0.1:1,[127.0.0.1]:2", r"address '\[127.0.0.1\]:2'"),
        ("::1:1,[::1]:2", "address '::1:1'"),
        ("127.0.0.1:1,127.0.0.1:port", "address '127.0.0.1:port'"),
        ("127.0.0.1:1,[::1]:2", "of IPv4 and of IPv6"),
    ],
)
def test_several_addresses_are_numbers(target: str, message: str) -> None:
    """Of one kind, each with its port; the message names the one at fault."""
    with pytest.raises(ConfigError, match=message):
        channel_target(target)


def test_of_several_addresses_tls_needs_the_name() -> None:
    """There is none to compare the certificates with."""
    credentials = ClientCredentials(tls=True)
    with pytest.raises(ConfigError, match="several addresses: set server_name"):
        Client("127.0.0.1:1,127.0.0.1:2", credentials=credentials)
