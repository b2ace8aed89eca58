"""What the client refuses by itself: nothing is sent, nobody is dialled."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from dragoman.client import AsyncClient, Client
from dragoman.errors import ConfigError, InvalidRequestError

NOBODY = "127.0.0.1:1"  # a call would end with NotReadyError

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {"text": 5}, "text is 5; it must be a text"),
    ("generate", {"text": None}, "text is None; it must be a text"),
    ("generate", {"text": b"abc"}, "text is b'abc'; it must be a text"),
    ("generate", {"text": "a\ud800"}, "cannot be sent"),
    ("generate", {"options": {"beam_size": 4}}, r"options is \{'beam_size': 4\}; it must be a .*DecodingOptions"),
    ("generate", {"options": None}, "options is None"),
    ("generate", {"request_id": 7}, "request_id is 7; it must be a text"),
    ("generate", {"priority": "high"}, "priority is 'high'; it must be an integer from -10 to 10"),
    ("generate", {"priority": 10**12}, "priority is 1000000000000; it must be an integer from -10 to 10"),
    ("generate", {"priority": True}, "priority is True"),
    ("generate", {"timeout": "5"}, "timeout is '5'; it must be a number of seconds"),
    ("generate", {"timeout": math.nan}, "timeout is nan"),
    ("generate", {"timeout": 1e10}, "timeout is 10000000000.0; it must be a number of seconds, at most 1000000000"),
    ("generate", {"timeout": 10**400}, "timeout is 1000.*at most 1000000000"),
    ("stream", {"text": 5}, "text is 5"),
    ("stream", {"options": 4}, "options is 4"),
    ("stream", {"timeout": "5"}, "timeout is '5'"),
    ("batch", {"texts": "abc"}, "texts is 'abc'; it must be a list of texts"),
    ("batch", {"texts": ["a", 3]}, r"texts\[1\] is 3"),
    ("batch", {"texts": 3}, "texts is 3"),
    ("score", {"text": "a", "target": 3}, "target is 3; it must be a text"),
    ("score", {"text": "a", "target": "b", "priority": 1.5}, "priority is 1.5"),
    ("model_info", {"timeout": []}, r"timeout is \[\]"),
]


@pytest.mark.parametrize("kind", [AsyncClient, Client])
@pytest.mark.parametrize(("method", "arguments", "message"), WRONG)
async def test_arguments_of_a_wrong_type_are_refused_before_any_call(
    kind: Any, method: str, arguments: dict[str, Any], message: str
) -> None:
    """By name, value and what it must be, as the server's own refusals: one ``except`` finds them all."""
    if method in ("generate", "stream"):
        arguments = {"text": "abc", **arguments}
    client = kind(NOBODY)
    with pytest.raises(InvalidRequestError, match=message):
        answer = getattr(client, method)(**arguments)
        if method == "stream":
            await anext(answer) if kind is AsyncClient else next(answer)
        elif inspect.isawaitable(answer):
            await answer
    closed = client.close()
    if inspect.isawaitable(closed):
        await closed


def test_a_model_s_name_is_a_text() -> None:
    """Told with the first call."""
    with Client(NOBODY, model=5) as client:  # type: ignore[arg-type]  # what the test is about
        with pytest.raises(InvalidRequestError, match="model is 5; it must be a text"):
            client.generate("abc")
        with pytest.raises(InvalidRequestError, match="model is 5"):
            client.model_info()


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_target_is_a_text(kind: Any) -> None:
    """HOST:PORT."""
    with pytest.raises(ConfigError, match="target is 50051; it must be a text, HOST:PORT"):
        kind(50051)
