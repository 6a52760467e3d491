"""The errors that this package raises on purpose, as a small tree.

FedP3Error
├── InputError       the user can fix it; raised before any training, exit code 2
│   ├── BusyError    a folder that another process is writing
│   ├── ConfigError  a config file or an override
│   ├── DataError    a data set that is missing, broken or cannot be downloaded
│   └── PlanError    a plan that cannot train the model
├── RunError         a run that started and cannot continue, exit code 1
└── CodecError       bytes from another machine or a file that are not what they claim to be
    └── CopyError    changes of weights that a client does not hold

Every message states what was received, what was expected, where, and what to do about it.
"""


class FedP3Error(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(FedP3Error):
    """Wrong input, detected before training."""


class BusyError(InputError):
    """A folder that another process is writing."""


class ConfigError(InputError):
    """A config that cannot be run."""


class DataError(InputError):
    """A data set that cannot be obtained or read."""


class PlanError(InputError):
    """A plan that leaves a layer untrained or cannot be carried out."""


class RunError(FedP3Error):
    """A run that cannot continue."""


class CodecError(FedP3Error):
    """Bytes that do not decode to what the plan allows."""


class CopyError(CodecError):
    """A client's copy of the published weights is missing or damaged."""


def type_of(value: object) -> str:
    """The type of a value in a sentence, as in "an int"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def first_line(error: Exception) -> str:
    """The first line of an error's text: those of other libraries may go on for pages."""
    return (str(error).strip().splitlines() or [""])[0]
