"""The errors that a caller of this package may expect. Each message names the value, the limit and the remedy.

TrainingError
|- ConfigError        a configuration file or a combination of its values
|- DataError          training, validation or test files
|- CheckpointError    a run or checkpoint folder
|- DecodingError      a search that may choose no token
|- ModelImportError   a model of another toolkit
"""

from __future__ import annotations


class TrainingError(Exception):
    """Anything this package refuses or gives up on, with a message for the person who started it."""


class ConfigError(TrainingError):
    """A configuration that cannot be used: unknown key, wrong type, impossible combination."""


class DataError(TrainingError):
    """Text files that cannot be used: missing, of unequal length, empty."""


class CheckpointError(TrainingError):
    """A run or checkpoint folder that cannot be read, written or continued."""


class DecodingError(TrainingError):
    """A search that may choose no token: what is suppressed and required leaves nothing."""


class ModelImportError(TrainingError):
    """A model of another toolkit that cannot be read, or that has parts which this package's model lacks."""
