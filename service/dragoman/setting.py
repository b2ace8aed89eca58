"""One setting: a field of a frozen dataclass that knows its name, help and range.

It is written once, in ``config.py``; flags, environment variables, keys of a file and their checks all come from it
(``settings.py``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from dragoman.errors import ConfigError

Value = bool | int | float | str | tuple[str, ...] | tuple[float, ...]
T = TypeVar("T")

_KEY: Final = "setting"
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_WORDS: Final[dict[type, str]] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What there is to know about a setting, but for its value."""

    field: str  # of its dataclass
    name: str  # of the key in a file; "max_calls" is --max-calls as a flag, and DRAGOMAN_MAX_CALLS
    default: Value
    help: str
    low: float | None  # both ends are allowed
    high: float | None
    choices: tuple[str, ...]
    metavar: str  # what stands for the value in help
    secret: bool  # not a flag, as anybody on the machine can read those, and never printed

    @property
    def flag(self) -> str:
        """As a command's option."""
        return "--" + self.name.replace("_", "-")

    def flag_of(self, value: Value) -> str:
        """The option that gives it this value."""
        return "--no" + self.flag[1:] if value is False else self.flag

    @property
    def variable(self) -> str:
        """As an environment variable."""
        return "DRAGOMAN_" + self.name.upper()

    @property
    def kind(self) -> type:
        """bool, int, float or str; of a list, its items'."""
        value = self.default
        return (type(value[0]) if value else str) if isinstance(value, tuple) else type(value)

    @property
    def is_list(self) -> bool:
        """Whether it has several values."""
        return isinstance(self.default, tuple)

    def parse(self, text: str) -> Value:
        """A value as it is written in a flag or variable; those of a list with commas between. Raises ValueError."""
        if self.is_list:
            return cast(Value, tuple(self._parse_one(item.strip()) for item in text.split(",") if item.strip()))
        return cast(Value, self._parse_one(text))

    def _parse_one(self, text: str) -> Any:
        if self.kind is not bool:
            return self.kind(text)
        if text.lower() not in _BOOLEANS:
            raise ValueError(text)
        return _BOOLEANS[text.lower()]

    def converted(self, value: object) -> Value:
        """A value of a file: integers may stand for numbers. What is of another type stays, for ``problem`` to name."""
        if isinstance(value, list):
            return cast(Value, tuple(self._converted_one(item) for item in value))
        return cast(Value, self._converted_one(value))

    def _converted_one(self, value: object) -> object:
        return float(value) if self.kind is float and type(value) is int else value

    def problem(self, value: object) -> str:
        """What is wrong with a value, to be put behind it; empty if nothing is."""
        if isinstance(value, tuple) != self.is_list:
            return f"it must be a list, each item {_WORDS[self.kind]}" if self.is_list else self.expected
        items = value if isinstance(value, tuple) else (value,)
        return "" if all(self._allows(item) for item in items) else self.expected

    def _allows(self, item: Any) -> bool:
        if type(item) is not self.kind and not (self.kind is float and type(item) is int):
            return False
        if self.choices and item not in self.choices:
            return False
        if self.low is None or self.high is None:
            return True
        return bool(self.low <= cast(float, item) <= self.high)  # written so that NaN fails

    @property
    def expected(self) -> str:
        """What it must be, for messages and help."""
        if self.choices:
            return f"it must be one of {', '.join(self.choices)}"
        if self.low is not None and self.high is not None:
            return f"it must be from {_number(self.low)} to {_number(self.high)}"
        return f"it must be {_WORDS[self.kind]}"


def setting(
    default: T,
    help_text: str,
    *,
    name: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    secret: bool = False,
) -> T:
    """A field of a dataclass. ``name``: the public one, where it is another than the field's."""
    known = Setting("", name, cast(Value, default), help_text, low, high, choices, metavar, secret)
    return dataclasses.field(default=default, metadata={_KEY: known})


def settings_of(section: type) -> tuple[Setting, ...]:
    """All settings of a dataclass, in its order."""
    return tuple(
        dataclasses.replace(known, field=field.name, name=known.name or field.name)
        for field in dataclasses.fields(section)
        for known in (field.metadata[_KEY],)
    )


def check(section: Any) -> None:
    """Raises ConfigError for a value of the wrong type or out of its range: for ``__post_init__``."""
    for known in settings_of(type(section)):
        value = getattr(section, known.field)
        if problem := known.problem(value):
            raise ConfigError(f"{known.field} is {value!r}; {problem}")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
