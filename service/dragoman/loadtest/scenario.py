"""What a load test sends, and when: stages, a mix of requests and a service level, as a TOML file has them.

    arrivals = "poisson"      # or "constant"
    warm_up_seconds = 2       # at the first stage's level; what was due then is in no figure

    [[stages]]                # one behind the other; each has a rate (open loop), or each has callers (closed loop)
    seconds = 30
    from_rate = 5             # a ramp; without it the stage has its rate from its start
    rate = 50                 # requests a second at its end

    [[mix]]                   # a request is of one of the parts, by chance
    name = "short"
    weight = 3
    texts = "sentences.txt"   # beside this file, one text a line (default: ten words)
    words = [3, 8]            # so many words that follow each other in those texts (default: a line of them)
    options = { beam_size = 4 }
    model = ""                # and version
    streaming = 0.5           # the share of streams
    cancel = 0.1              # the share that this side cancels, cancel_after_ms = [10, 200] behind its sending
    deadline_ms = 10000       # from when a request was due

    [slo]                     # exit status 1 where it is missed
    max_p99_ms = 500
    max_p99_first_ms = 200
    max_error_rate = 0.001

``think_seconds`` is how long a caller of a closed loop waits behind an answer.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from dragoman.errors import ConfigError, InvalidRequestError
from dragoman.loadtest.arrivals import Arrivals, Stage
from dragoman.loadtest.report import Slo
from dragoman.types import DecodingOptions

T = TypeVar("T")

WORDS: Final = (
    "sloth",
    "attention",
    "transformer",
    "queue",
    "giraffe",
    "measure",
    "through",
    "language",
    "pronunciation",
    "of",
)
MAX_REQUESTS: Final = 10_000_000
"""Every outcome is kept in memory."""
MAX_CALLERS: Final = 10_000
_GREEDY: Final = DecodingOptions()
_NO_LIMITS: Final = Slo()


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of request. Raises ConfigError."""

    name: str = "all"
    weight: float = 1.0
    texts: tuple[str, ...] = WORDS
    words: tuple[int, int] | None = None
    options: DecodingOptions = _GREEDY
    model: str = ""
    version: str = ""
    streaming: float = 0.0
    cancel: float = 0.0
    cancel_after_ms: tuple[float, float] = (10.0, 200.0)
    deadline_ms: float = 10_000.0

    def __post_init__(self) -> None:
        where = f"part {self.name!r}: "
        _check(where, "weight", self.weight, 0.0, math.inf, above=True)
        _check(where, "deadline_ms", self.deadline_ms, 0.0, 3_600_000.0, above=True)
        _check(where, "streaming", self.streaming, 0.0, 1.0)
        _check(where, "cancel", self.cancel, 0.0, 1.0)
        _check_range(where, "cancel_after_ms", self.cancel_after_ms, 0.0)
        if self.words is not None:
            _check_range(where, "words", self.words, 1)
        if not self.texts:
            raise ConfigError(f"{where}there is no text: give it one at least")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load. Raises ConfigError for one that is none, or too large to keep."""

    stages: tuple[Stage, ...]
    mix: tuple[Part, ...] = field(default_factory=lambda: (Part(),))
    closed: bool = False  # whether the stages' levels are callers, who each wait for their answer
    arrivals: Arrivals = Arrivals.POISSON
    warm_up_seconds: float = 0.0
    think_seconds: float = 0.0
    slo: Slo = _NO_LIMITS

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("there are no stages: give one at least")
        if not self.mix:
            raise ConfigError("the mix has no part: give one at least, or leave it out")
        if len({part.name for part in self.mix}) < len(self.mix):
            raise ConfigError("parts of the mix share a name: give each one of its own")
        _check("", "warm_up_seconds", self.warm_up_seconds, 0.0, 3600.0)
        _check("", "think_seconds", self.think_seconds, 0.0, 3600.0)
        for number, stage in enumerate(self.stages, 1):
            where = f"stage {number}: "
            _check(where, "seconds", stage.seconds, 0.0, 7 * 86400.0, above=True)
            for level in (stage.from_level, stage.level):
                _check(where, "callers" if self.closed else "rate", level, 0.0, MAX_CALLERS if self.closed else 1e6)
        if self.peak == 0:
            raise ConfigError("no stage has a level above 0: nothing would be sent")
        if self.asked_rate is not None and (requests := self.asked_rate * self.seconds) > MAX_REQUESTS:
            raise ConfigError(
                f"a rate of {self.asked_rate:g} for {self.seconds:g} s is {requests:.0f} requests; every outcome is "
                f"kept in memory, so at most {MAX_REQUESTS} are allowed: lower one of them"
            )

    @property
    def seconds(self) -> float:
        """Of all stages, without the warm-up."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def peak(self) -> float:
        """The highest level."""
        return max(max(stage.from_level, stage.level) for stage in self.stages)

    @property
    def asked_rate(self) -> float | None:
        """The mean rate of an open loop; None of a closed one."""
        return None if self.closed else sum(stage.area for stage in self.stages) / self.seconds

    @property
    def warmed_stages(self) -> tuple[Stage, ...]:
        """The stages with the warm-up before them."""
        first = self.stages[0].from_level or self.stages[0].level
        warm_up = (Stage(self.warm_up_seconds, first, first),) if self.warm_up_seconds else ()
        return (*warm_up, *self.stages)

    def scaled(self, *, peak: float | None = None, seconds: float | None = None) -> Scenario:
        """The same shape with another highest level, or another length."""
        high = 1.0 if peak is None else peak / self.peak
        long = 1.0 if seconds is None else seconds / self.seconds
        stages = tuple(Stage(s.seconds * long, s.from_level * high, s.level * high) for s in self.stages)
        return replace(self, stages=stages)


def read_scenario(path: Path) -> Scenario:
    """A scenario from a TOML file. Raises ConfigError, which names the file."""
    try:
        return _scenario(tomllib.loads(path.read_text(encoding="utf-8")), path.parent)
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the scenario {path} is no TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"the scenario {path}: {error}") from error


def read_texts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not blank. Raises ConfigError when there are none, or the file cannot be read."""
    try:
        texts = tuple(line for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the texts {path}: {error}") from error
    if not texts:
        raise ConfigError(f"{path} holds no text: give it one text a line")
    return texts


def _scenario(table: Mapping[str, Any], folder: Path) -> Scenario:
    values = dict(table)
    if "closed" in values:
        raise ConfigError("closed cannot be set: a loop is closed where its stages have callers")
    stages = values.pop("stages", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError("stages is no list of tables: write [[stages]]")
    closed = any("callers" in stage for stage in stages)
    values["stages"] = tuple(_stage(number, stage, closed) for number, stage in enumerate(stages, 1))
    values["closed"] = closed
    if "mix" in values:
        mix = values["mix"]
        if not isinstance(mix, list) or not all(isinstance(part, dict) for part in mix):
            raise ConfigError("mix is no list of tables: write [[mix]]")
        values["mix"] = tuple(_part(number, part, folder) for number, part in enumerate(mix, 1))
    if "arrivals" in values:
        if values["arrivals"] not in tuple(Arrivals):
            raise ConfigError(f"arrivals is {values['arrivals']!r}; it must be one of {', '.join(Arrivals)}")
        values["arrivals"] = Arrivals(values["arrivals"])
    if "slo" in values:
        values["slo"] = _made(Slo, "slo", values["slo"])
    return _made(Scenario, "the file", values)


def _stage(number: int, table: Mapping[str, Any], closed: bool) -> Stage:
    name = "callers" if closed else "rate"
    where = f"stage {number}"
    known = {"seconds", name, f"from_{name}"}
    if unknown := sorted(set(table) - known):
        raise ConfigError(
            f"{where} has {', '.join(unknown)}; a stage of {'a closed' if closed else 'an open'} loop has seconds, "
            f"{name} and from_{name}"
        )
    if missing := sorted({"seconds", name} - set(table)):
        raise ConfigError(f"{where} lacks {' and '.join(missing)}")
    for key, value in table.items():
        _check_number(f"{where}: ", key, value)
    return Stage(float(table["seconds"]), float(table.get(f"from_{name}", table[name])), float(table[name]))


def _part(number: int, table: Mapping[str, Any], folder: Path) -> Part:
    values = {"name": f"part {number}", **table}
    if "texts" in values:
        if not isinstance(values["texts"], str):
            raise ConfigError(f"{values['name']}: texts is {values['texts']!r:.100}; it must be the name of a file")
        values["texts"] = read_texts(folder / values["texts"])
    for name in ("words", "cancel_after_ms"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if "options" in values:
        try:
            values["options"] = DecodingOptions(**{k: _frozen(v) for k, v in dict(values["options"]).items()})
        except (InvalidRequestError, TypeError, ValueError) as error:
            raise ConfigError(f"{values['name']}: options: {error}") from error
    return _made(Part, str(values["name"]), values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _made(kind: type[T], where: str, values: Any) -> T:
    """A dataclass out of a table. Raises ConfigError for a key that is none, and for numbers and texts mixed up."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {values!r:.100}; it must be a table")
    defaults = {known.name: known.default for known in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for name, value in values.items():
        if name not in defaults:
            raise ConfigError(f"{where} has {name!r}, which is none of {', '.join(defaults)}")
        default = defaults[name]
        if (default is None and not isinstance(value, tuple)) or isinstance(default, float):
            _check_number(f"{where}: ", name, value)
        elif default is not MISSING and isinstance(default, str) and not isinstance(value, str):
            raise ConfigError(f"{where}: {name} is {value!r:.100}; it must be a text")
    return kind(**values)


def _check_number(where: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}{name} is {value!r:.100}; it must be a number")


def _check(where: str, name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if not (low < value if above else low <= value) or not value <= high or not math.isfinite(value):
        raise ConfigError(
            f"{where}{name} is {value:g}; it must be {'above' if above else 'from'} {low:g} and at most {high:g}"
        )


def _check_range(where: str, name: str, value: object, low: float) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ConfigError(f"{where}{name} is {value!r:.100}; it must be two numbers, the least and the most")
    for number in value:
        _check_number(where, name, number)
    if not low <= value[0] <= value[1] or (isinstance(low, int) and not all(isinstance(n, int) for n in value)):
        raise ConfigError(f"{where}{name} is {list(value)}; it must be two numbers from {low:g} on, the least first")
