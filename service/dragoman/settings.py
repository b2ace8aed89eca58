"""Where the values of settings come from: a file, then the environment, then flags; what comes later wins.

    max_waiting = 200           # a TOML file, by the settings' names
    [per_model.en-de]           # what one model has of its own: how it runs, its engine, its GPU
    slots = 16

    DRAGOMAN_MAX_WAITING=300    # in the environment; of a list, with commas between
    --max-waiting 400           # as a flag

A name that no setting has is an error, wherever it stands: what is mistyped would otherwise have no effect. Variables
that Kubernetes makes up for services whose names begin with "dragoman" are passed over.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from dragoman.config import MODEL_SECTIONS, SECTIONS
from dragoman.errors import ConfigError
from dragoman.setting import Setting, Value, settings_of

S = TypeVar("S")

FILE_VARIABLE: Final = "DRAGOMAN_CONFIG"
TOKEN_VARIABLE: Final = "DRAGOMAN_TOKEN"  # for the commands that call a server; no setting
"""The environment variable that names the file, where no flag does."""

_PREFIX: Final = "DRAGOMAN_"
_PER_MODEL: Final = "per_model"
_KUBERNETES: Final = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_KUBERNETES_URL: Final = re.compile(r"(tcp|udp|sctp)://.*")
_MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave, and what it is called there: a flag, a variable, a key of a file."""

    value: Value
    origin: str


class Settings:
    """Every setting that was given; the others have their defaults. Unchangeable."""

    def __init__(self, given: Mapping[str, Given], per_model: Mapping[str, Mapping[str, Given]]) -> None:
        self._given = dict(given)
        self._per_model = {name: dict(own) for name, own in per_model.items()}

    def section(self, section: type[S], model: str = "") -> S:
        """The values of a dataclass of settings, with what this model has of its own. Raises ConfigError."""
        own = self._per_model.get(model, {})
        values = {
            known.field: found.value
            for known in settings_of(section)
            if (found := own.get(known.name, self._given.get(known.name))) is not None
        }
        return section(**values)

    def origins(self, section: type) -> list[str]:
        """Where the values of a section were given, of those that were; models' own are not among them."""
        return [self._given[known.name].origin for known in settings_of(section) if known.name in self._given]

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have settings of their own."""
        return tuple(self._per_model)

    def check(self) -> None:
        """Raises ConfigError unless each section is sound as a whole, also with what models have of their own."""
        for section in SECTIONS.values():
            self.section(section)
        for model in self._per_model:
            for section in MODEL_SECTIONS:
                self.section(section, model)

    def to_toml(self) -> str:
        """All settings as a file would have them, each with where its value came from; secrets are hidden."""
        lines: list[str] = []
        for title, section in SECTIONS.items():
            lines += ["", f"# {title}"] if lines else [f"# {title}"]
            for known in settings_of(section):
                found = self._given.get(known.name, Given(known.default, "default"))
                lines.append(_line(known, found))
        for model, own in self._per_model.items():
            lines += ["", f"[{_PER_MODEL}.{json.dumps(model, ensure_ascii=False)}]"]
            lines += [_line(_known(MODEL_SECTIONS)[name], found) for name, found in own.items()]
        return "\n".join(lines) + "\n"


def read_settings(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Value] | None = None
) -> Settings:
    """What was given. ``flags`` are by the settings' names.

    Raises ConfigError, which says where, for a file that cannot be read, for a name that no setting has, and for a
    value that its setting cannot have. ``Settings.check`` looks at values that must suit each other.
    """
    given: dict[str, Given] = {}
    per_model: dict[str, dict[str, Given]] = {}
    environment = environment or {}
    if file is None and (named := environment.get(FILE_VARIABLE)):
        file = Path(named)
    if file is not None:
        table = _read_file(file)
        per_model = _per_model_of(file, table.pop(_PER_MODEL, {}))
        given |= _of_table(str(file), table, _known(SECTIONS.values()), (_PER_MODEL,))
    given |= _of_environment(environment)
    known = _known(SECTIONS.values())
    for name, value in (flags or {}).items():
        given[name] = _checked(known[name], value, known[name].flag_of(value))
    return Settings(given, per_model)


def _known(sections: Iterable[type]) -> dict[str, Setting]:
    return {known.name: known for section in sections for known in settings_of(section)}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES} bytes: it is no file of settings")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def _per_model_of(file: Path, tables: object) -> dict[str, dict[str, Given]]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{file}: {_PER_MODEL} is for tables: write [{_PER_MODEL}.NAME], and settings below it")
    known = _known(MODEL_SECTIONS)
    return {model: _of_table(f"{file}, [{_PER_MODEL}.{model}]", table, known) for model, table in tables.items()}


def _of_table(
    place: str, table: Mapping[str, object], known: Mapping[str, Setting], other_names: tuple[str, ...] = ()
) -> dict[str, Given]:
    given = {}
    for name, value in table.items():
        if name not in known:
            whose = " that a model can have of its own" if "[" in place else ""
            raise ConfigError(f"{place}: there is no setting {name!r}{whose}; {_nearest(name, (*known, *other_names))}")
        given[name] = _checked(known[name], known[name].converted(value), f"{place}: {name}")
    return given


def _of_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    by_variable = {known.variable: known for known in _known(SECTIONS.values()).values()}
    given = {}
    for variable, text in _own_variables(environment):
        if variable not in by_variable:
            names = (*by_variable, FILE_VARIABLE)
            raise ConfigError(f"the environment has {variable}, which is no setting; {_nearest(variable, names)}")
        known = by_variable[variable]
        try:
            value = known.parse(text)
        except ValueError:
            shown = "hidden" if known.secret else repr(text)
            raise ConfigError(f"{variable} is {shown}; {known.expected}") from None
        given[known.name] = _checked(known, value, variable)
    return given


def _own_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or variable in (FILE_VARIABLE, TOKEN_VARIABLE):
            continue
        # A Kubernetes service named dragoman gives each pod beside it DRAGOMAN_PORT=tcp://10.0.0.1:50051, and more.
        if _KUBERNETES.fullmatch(variable) or (variable.endswith("_PORT") and _KUBERNETES_URL.fullmatch(text)):
            continue
        yield variable, text


def _checked(known: Setting, value: Value, origin: str) -> Given:
    if problem := known.problem(value):
        raise ConfigError(f"{origin} is {'hidden' if known.secret else repr(value)}; {problem}")
    return Given(value, origin)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, tuple(names), n=1, cutoff=0.6)
    return f"the nearest is {near[0]!r}" if near else "dragoman serve --check prints all there are"


def _line(known: Setting, found: Given) -> str:
    if known.secret and found.value:
        return f"# {known.name} is hidden  # {found.origin}"
    return f"{known.name} = {_toml(found.value)}  # {found.origin}"


def _toml(value: Value) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()
