"""Why a node refuses a message: a code for the server, and a text for the node's own log.

The text may contain values of the data, such as a label or the number of records.  It is written to
the log on the node and leaves it only if the owner's policy reveals errors.
"""

from enum import StrEnum

from fedp3.core.errors import CodecError, CopyError, DataError, FedP3Error, InputError, RunError


class RefusalCode(StrEnum):
    """Why a node sent no update."""

    MESSAGE = "message"
    CONFIG = "config"
    PERMIT = "permit"
    PLAN = "plan"
    CAPACITY = "capacity"
    PRIVACY = "privacy"
    BUDGET = "budget"
    STATE = "state"
    COPY = "copy"
    DATA = "data"
    SETUP = "setup"
    TRAINING = "training"


# What the server shows for each code; the node's log has the details.
MEANINGS = {
    RefusalCode.MESSAGE: "the message is malformed or does not fit its network",
    RefusalCode.CONFIG: "its policy does not accept this config",
    RefusalCode.PERMIT: "its policy needs a valid permit of a run owner",
    RefusalCode.PLAN: "the plan asks for what this config cannot make, or for a personal layer",
    RefusalCode.CAPACITY: "the task is larger than this node can hold",
    RefusalCode.PRIVACY: "the task's privacy settings are not those that it accepts",
    RefusalCode.BUDGET: "its privacy budget does not allow this task",
    RefusalCode.STATE: "its state from earlier rounds is missing, or belongs to another run",
    RefusalCode.COPY: "it does not hold the weights that the task changes",
    RefusalCode.DATA: "its data cannot be used",
    RefusalCode.SETUP: "it is not set up correctly",
    RefusalCode.TRAINING: "its training failed",
}


class Refused(RunError):
    """A message that the node does not act on.

    Args:
        code: what the server is told.
        text: what the node's log says.
    """

    def __init__(self, code: RefusalCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def code_of(error: Exception) -> RefusalCode:
    """The code of any exception that a message caused."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, CopyError):
        return RefusalCode.COPY
    if isinstance(error, CodecError):
        return RefusalCode.MESSAGE
    if isinstance(error, DataError):
        return RefusalCode.DATA
    if isinstance(error, InputError):
        return RefusalCode.SETUP
    return RefusalCode.STATE if isinstance(error, FedP3Error) else RefusalCode.TRAINING


def meaning(code: object) -> str:
    """What a code means, in a sentence for the server's log; foreign text is not repeated."""
    known = {str(c): text for c, text in MEANINGS.items()}
    if code not in known:
        return "its node sent no update and an unknown code"
    return f"its node refused ({code}): {known[str(code)]}; the node's log has the details"
