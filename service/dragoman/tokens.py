"""Bearer tokens from a TOML file: who calls, and how much each may ask for. Read again when the file changes.

    [alice]                        # a name: letters, digits, "_", "-" and "."; fairness counts by it
    secret = "a long random text"  # at least 16 visible ASCII characters, no blanks
    requests_per_second = 20       # optional: texts, on average; what was not used up to a second ago may come at once
    max_running = 8                # optional: calls at a time

    [bob]
    sha256 = "9f86d0818…"          # instead of the secret, its SHA-256 in hexadecimal: the file then holds no secret

A caller sends ``authorization: Bearer SECRET`` with each call. To make a secret: ``openssl rand -hex 24``; its hash:
``printf %s SECRET | sha256sum``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dragoman.certificates import read_file
from dragoman.errors import ConfigError, OverloadedError, UnauthenticatedError
from dragoman.renewal import Renewed

METADATA_KEY: Final = "authorization"

_SCHEME: Final = "bearer "
_LOOK_SECONDS: Final = 1.0  # how often the file is looked at, at most
_MAX_TOKENS: Final = 10_000
_MIN_SECRET: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SECRET: Final = re.compile(rf"[\x21-\x7e]{{{_MIN_SECRET},512}}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_RUNNING: Final = 1 << 20
_MAX_RATE: Final = 1e6


@dataclass(frozen=True, slots=True)
class Token:
    """One caller's. ``digest`` is the SHA-256 of its secret."""

    name: str
    digest: bytes
    requests_per_second: float | None = None
    max_running: int | None = None


class Allowance:
    """What one caller may ask for, and what of it is used. Not thread-safe.

    Requests are paid for from a purse that fills at their rate and holds those of one second, or one.
    """

    def __init__(self, token: Token) -> None:
        self.token = token
        self._num_running = 0
        self._purse = self._full
        self._filled_at: float | None = None

    @property
    def _full(self) -> float:
        return max(1.0, self.token.requests_per_second or 0.0)

    def enter(self, now: float) -> None:
        """One more call, with one request; to be left. Raises OverloadedError."""
        limit = self.token.max_running
        if limit is not None and self._num_running >= limit:
            raise OverloadedError(
                f"{self._num_running} calls of {self.token.name} run, its limit is {limit}: wait for one to end"
            )
        self.pay(now)
        self._num_running += 1

    def pay(self, now: float) -> None:
        """For one more request. Raises OverloadedError."""
        rate = self.token.requests_per_second
        if rate is None:
            return
        elapsed = 0.0 if self._filled_at is None else now - self._filled_at
        self._purse = min(self._full, self._purse + elapsed * rate)
        self._filled_at = now
        if self._purse < 1.0:
            seconds = (1.0 - self._purse) / rate
            raise OverloadedError(
                f"{self.token.name} may make {rate:g} requests a second, and has made them: retry in {seconds:.3f} s",
                seconds,
            )
        self._purse -= 1.0

    def charge(self, num_requests: int) -> None:
        """A call turns out to have so many more requests: they are paid for, if need be by those to come."""
        if self.token.requests_per_second is not None:
            self._purse -= num_requests

    def leave(self) -> None:
        """The call is over."""
        self._num_running -= 1


class Tokens:
    """The callers that may come in. Belongs to one event loop; it knows no clock."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is not as described on top; its messages hold no secret."""
        self._file = Renewed("tokens", [Path(path)], lambda: read_tokens(path))
        self._looked_at: float | None = None
        self._allowances: dict[str, Allowance] = {}

    def allowance(self, metadata: Mapping[str, str | bytes], now: float) -> Allowance:
        """The caller's, by what came with a call. Raises UnauthenticatedError."""
        if self._looked_at is None or now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            if self._file.renew():
                self._allowances = {n: a for n, a in self._allowances.items() if n in self._file.value.names}
        value = metadata.get(METADATA_KEY)
        if not isinstance(value, str) or value[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError(f"this server wants a token: send the metadata {METADATA_KEY}: Bearer TOKEN")
        token = self._file.value.find(value[len(_SCHEME) :])
        if token is None:
            raise UnauthenticatedError("the token is none of this server's: ask whoever runs it for one")
        allowance = self._allowances.setdefault(token.name, Allowance(token))
        allowance.token = token  # its limits may be others than before
        return allowance


class TokenSet:
    """Tokens by their secrets."""

    def __init__(self, tokens: list[Token]) -> None:
        self._by_digest = {token.digest: token for token in tokens}
        self.names = frozenset(token.name for token in tokens)

    def find(self, secret: str) -> Token | None:
        """Whose secret it is. The time it takes tells nothing of any secret: hashes alone are looked up."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
        token = self._by_digest.get(digest)
        return token if token is not None and hmac.compare_digest(token.digest, digest) else None


def read_tokens(path: str) -> TokenSet:
    """Raises ConfigError."""
    try:
        entries = tomllib.loads(read_file(path, "tokens").decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also of endless digits, and of brackets in brackets
        where = f": {error}" if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise ConfigError(f"tokens {path} is no TOML file in UTF-8{where}") from None
    if not entries or len(entries) > _MAX_TOKENS:
        raise ConfigError(f"tokens {path} has {len(entries)} tokens; there must be from 1 to {_MAX_TOKENS}")
    tokens = [_token(path, name, entry) for name, entry in entries.items()]
    owners: dict[bytes, str] = {}
    for token in tokens:
        if (other := owners.setdefault(token.digest, token.name)) != token.name:
            raise ConfigError(f"tokens {path}: {other} and {token.name} have the same secret: give each its own")
    return TokenSet(tokens)


def _token(path: str, name: str, entry: object) -> Token:
    where = f"tokens {path}, {name[:64]!r}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has up to 64 letters, digits, '_', '-' and '.'")
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no table: write [{name}] and its keys below")
    known: dict[str, Callable[[Any], bool]] = {
        "secret": lambda v: isinstance(v, str) and bool(_SECRET.fullmatch(v)),
        "sha256": lambda v: isinstance(v, str) and bool(_SHA256.fullmatch(v)),
        "requests_per_second": lambda v: type(v) in (int, float) and 0 < v <= _MAX_RATE,
        "max_running": lambda v: type(v) is int and 1 <= v <= _MAX_RUNNING,
    }
    must_be = {
        "secret": f"{_MIN_SECRET} to 512 visible ASCII characters without blanks",
        "sha256": "64 hexadecimal digits, in lower case",
        "requests_per_second": f"a number above 0, at most {_MAX_RATE:g}",
        "max_running": f"an integer from 1 to {_MAX_RUNNING}",
    }
    for key, value in entry.items():
        if key not in known:
            raise ConfigError(f"{where} has a key {key[:64]!r}; there is {', '.join(known)}")
        if not known[key](value):
            raise ConfigError(f"{where}: {key} must be {must_be[key]}")  # the value may be a secret
    if ("secret" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where} must have either secret or sha256")
    digest = bytes.fromhex(entry["sha256"]) if "sha256" in entry else hashlib.sha256(entry["secret"].encode()).digest()
    return Token(name, digest, entry.get("requests_per_second"), entry.get("max_running"))
