"""What a client dials: one server, or several that share the work."""

from __future__ import annotations

import ipaddress
import json
from typing import Any, Final

from dragoman.errors import ConfigError

_ROUND_ROBIN: Final = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def channel_target(target: str) -> tuple[str, list[tuple[str, Any]]]:
    """gRPC's name for ``HOST:PORT``, or for ``IP:PORT,IP:PORT,...``, and the options that go with it.

    Calls go to all addresses in turn: to those given, or to those that DNS has for a name. One that cannot be reached
    is left out until it can. A name is looked up again when a connection is lost, at most every 30 s.

    Raises ConfigError for several addresses that are not all of IPv4, or all of IPv6.
    """
    options = [("grpc.service_config", _ROUND_ROBIN)]
    if "," not in target:
        return target, options
    addresses = target.split(",")
    versions = {_version(target, address) for address in addresses}
    if len(versions) > 1:
        raise ConfigError(f"target {target!r} has addresses of IPv4 and of IPv6: give those of one kind")
    return f"ipv{versions.pop()}:{target}", [*options, ("grpc.default_authority", addresses[0])]


def _version(target: str, address: str) -> int:
    host, _, port = address.rpartition(":")
    try:
        version: int | None = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        version = None
    if version is None or not port.isdecimal() or host.startswith("[") != (version == 6):
        raise ConfigError(
            f"target {target!r} has the address {address!r}; of several, each must be IP:PORT: for servers with names, "
            "give one name under which DNS has all of them"
        )
    return version
