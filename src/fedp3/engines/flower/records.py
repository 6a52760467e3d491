"""Our messages inside Flower's: one frame of `codec` bytes each, and what a node says about itself.

A frame travels as one Array of raw bytes, which Flower cuts into chunks and never interprets; `codec` checks sizes
before it parses, and nothing is unpickled.
    task     "fedp3" {frame}   "about" {run}          [+ "state" {frame}, in simulation]
    reply    "fedp3" {frame}   or "failure" {reason}  [+ "state" {frame}, in simulation]
    query    ->  "node" {client, examples, capacity, digest}
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fedp3.errors import CodecError
from fedp3.types import ClientState

FRAME, STATE, ABOUT, FAILURE, NODE = "fedp3", "state", "about", "failure", "node"
REASON_LIMIT = 500  # characters of a node's own words that are kept


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says about itself when asked."""

    client: int
    examples: int
    capacity: float  # share of a layer it can hold; 1: everything
    digest: str  # of the config it was set up with


# --------------------------------------------------------------------------- frames


def put_frame(content: RecordDict, frame: bytes, name: str = FRAME) -> RecordDict:
    """Add bytes of ours to a message."""
    content[name] = ArrayRecord({"frame": Array("uint8", (len(frame),), "fedp3", frame)})
    return content


def frame_of(content: RecordDict, name: str = FRAME) -> bytes:
    """The bytes of ours in a message; `codec` looks at their size before anything else."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord) or list(record) != ["frame"]:
        raise CodecError(f"the message holds no {name!r} frame")
    return record["frame"].data


# --------------------------------------------------------------------------- what else a message holds


def state_bytes(state: ClientState) -> bytes:
    """What a client keeps, with the round that left it."""
    return save_tensors({f"{state.t}/{n}": w.contiguous() for n, w in state.tensors.items()})


def state_of(data: bytes) -> ClientState:
    """The inverse of `state_bytes`."""
    try:
        named = {tuple(n.split("/", 1)): w for n, w in load_tensors(data).items()}
        (t,) = {int(t) for t, _ in named}
    except Exception as error:  # safetensors has an error of its own for every kind of damage
        raise CodecError(f"these bytes are no client state: {type(error).__name__}") from None
    return ClientState(t, {n: w for (_, n), w in named.items()})


def failure(reason: str) -> RecordDict:
    """A reply that says why there is none."""
    return RecordDict({FAILURE: ConfigRecord({"reason": reason[:REASON_LIMIT]})})


def failure_in(content: RecordDict) -> str | None:
    """Why a node could not answer, in its own words made harmless; None if it did answer."""
    record = content.get(FAILURE)
    if not isinstance(record, ConfigRecord):
        return None
    return clean(record.get("reason"))


def clean(words: object) -> str:
    """Somebody else's text as one printable line of bounded length."""
    text = words if isinstance(words, str) else f"a {type(words).__name__} instead of a reason"
    line = " ".join(text[: 4 * REASON_LIMIT].split())
    return "".join(c if c.isprintable() else "?" for c in line)[:REASON_LIMIT] or "no reason given"


def identity_record(identity: Identity) -> RecordDict:
    """The answer to a query."""
    said = {"client": identity.client, "examples": identity.examples, "capacity": float(identity.capacity)}
    return RecordDict({NODE: ConfigRecord({**said, "digest": identity.digest})})


def identity_of(content: RecordDict) -> Identity:
    """What a node said about itself, every field checked."""
    record = content.get(NODE)
    said: Mapping[str, object] = record if isinstance(record, ConfigRecord) else {}
    client, examples, capacity, digest = (said.get(k) for k in ("client", "examples", "capacity", "digest"))
    if type(client) is not int or not 0 <= client < 1 << 31:
        raise CodecError("it names no client; start it with --node-config 'partition-id=0'")
    if type(examples) is not int or not 0 <= examples < 1 << 62:
        raise CodecError("its number of examples is none")
    if not isinstance(capacity, float) or not (math.isfinite(capacity) and 0 < capacity <= 1):
        raise CodecError("its capacity is not a share in (0, 1]")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CodecError("its config has no digest")
    return Identity(client, examples, capacity, digest)


def run_of(content: RecordDict) -> str:
    """The run a task belongs to; part of a folder's name on the node, so nothing but hex digits."""
    record = content.get(ABOUT)
    run = record.get("run") if isinstance(record, ConfigRecord) else None
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run):
        raise CodecError("the task names no run")
    return run
