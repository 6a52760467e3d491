"""Our messages inside Flower's: one frame of `codec` bytes each, and a node's identity.

A frame is sent as one Array of raw bytes, which Flower splits into chunks and never interprets.
`codec` checks sizes before it parses, and nothing is unpickled.

    task     "fedp3" {frame}   "about" {run, mechanism, permit}  [and "state", in simulation]
    reply    "fedp3" {frame}   or "failure" {code}               [and "state", in simulation]
    query    answered by "node" {client, clients, examples, capacity, digest, device, frozen, ...}

Tasks and queries of the strategy also have "settings" {text}: the settings of the run as JSON.
The first task of a client then has "initial" {frame}: W_0 of layers that are never sent otherwise.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import TypeAdapter
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fedp3.core.errors import CodecError, type_of
from fedp3.core.types import ClientState
from fedp3.data.sample_spec import SampleSpec
from fedp3.devices.settings import DeviceRow
from fedp3.node.context import Request
from fedp3.node.permits import permit_text, read_permit
from fedp3.node.refusal import RefusalCode, meaning
from fedp3.privacy.settings import Mechanism

FRAME, STATE, ABOUT, FAILURE, NODE = "fedp3", "state", "about", "failure", "node"
SETTINGS, INITIAL = "settings", "initial"
DEVICE_ROW: TypeAdapter[DeviceRow] = TypeAdapter(DeviceRow)
SAMPLE_SPEC: TypeAdapter[SampleSpec] = TypeAdapter(SampleSpec)
REASON_LIMIT = 500  # characters of a node's text that are used
TEXT_LIMIT = 1_000_000  # characters of settings, or of a description of samples, that are parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a node is, as it answers the server's query."""

    client: int
    examples: int
    capacity: float  # the share of a layer that it can hold; 1 means all of it
    digest: str  # of the config it was set up with
    device: DeviceRow | None = None  # what its device can do, if its owner says so
    clients: int = 0  # how many clients its run has; 0 if it does not say
    sample: SampleSpec | None = None  # shapes of its samples, where only nodes have data
    simulated: bool = False  # whether it is played by a process of Flower's simulation
    frozen: str = ""  # the hash of the frozen part of its network; empty if there is none


# --------------------------------------------------------------------------- frames


def put_frame(content: RecordDict, frame: bytes, name: str = FRAME) -> RecordDict:
    """Add a frame to a message."""
    content[name] = ArrayRecord({"frame": Array("uint8", (len(frame),), "fedp3", frame)})
    return content


def frame_of(content: RecordDict, name: str = FRAME) -> bytes:
    """The frame in a message; `codec` checks its size before anything else."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord) or list(record) != ["frame"]:
        raise CodecError(f"the message holds no {name!r} frame")
    return record["frame"].data


# ------------------------------------------------------------------------- states, reasons, nodes


def state_bytes(state: ClientState) -> bytes:
    """A client's state as bytes."""
    return save_tensors({f"{state.t}/{n}": w.contiguous() for n, w in state.tensors.items()})


def state_of(data: bytes) -> ClientState:
    """The inverse of `state_bytes`."""
    try:
        tensors = {tuple(n.split("/", 1)): w for n, w in load_tensors(data).items()}
        (t,) = {int(t) for t, _ in tensors}
    except Exception as error:  # safetensors has its own error for every kind of damage
        raise CodecError(f"these bytes are no client state: {type(error).__name__}") from None
    return ClientState(t, {n: w for (_, n), w in tensors.items()})


def failure(reason: str, code: RefusalCode = RefusalCode.TRAINING) -> RecordDict:
    """The reply of a simulated client, or of a node whose policy reveals errors, that failed."""
    return RecordDict({FAILURE: ConfigRecord({"reason": reason[:REASON_LIMIT], "code": str(code)})})


def refusal(code: RefusalCode) -> RecordDict:
    """The reply of a node that does not act on a message: a code, without any value."""
    return RecordDict({FAILURE: ConfigRecord({"code": str(code)})})


def failure_in(content: RecordDict) -> str | None:
    """Why a node did not do its task, as one printable line; None if it did."""
    record = content.get(FAILURE)
    if not isinstance(record, ConfigRecord):
        return None
    return clean(record["reason"]) if "reason" in record else meaning(record.get("code"))


def lost_copy(content: RecordDict) -> bool:
    """Whether a node refused its task because the weights that it changes are not there."""
    record = content.get(FAILURE)
    return isinstance(record, ConfigRecord) and record.get("code") == str(RefusalCode.COPY)


def clean(words: object) -> str:
    """A foreign text as one printable line of bounded length."""
    text = words if isinstance(words, str) else f"{type_of(words)} instead of a reason"
    line = " ".join(text[: 4 * REASON_LIMIT].split())
    return "".join(c if c.isprintable() else "?" for c in line)[:REASON_LIMIT] or "no reason given"


def identity_record(identity: Identity) -> RecordDict:
    """The answer to a query."""
    record = ConfigRecord(
        {
            "client": identity.client,
            "examples": identity.examples,
            "capacity": float(identity.capacity),
            "digest": identity.digest,
            "device": "" if identity.device is None else json.dumps(asdict(identity.device)),
            "clients": identity.clients,
            "sample": "" if identity.sample is None else json.dumps(asdict(identity.sample)),
            "simulated": identity.simulated,
            "frozen": identity.frozen,
        }
    )
    return RecordDict({NODE: record})


def identity_of(content: RecordDict) -> Identity:
    """The identity in a node's answer, with every field checked."""
    record = content.get(NODE)
    keys: Mapping[str, object] = record if isinstance(record, ConfigRecord) else {}
    client, examples = keys.get("client"), keys.get("examples")
    capacity, digest = keys.get("capacity"), keys.get("digest")
    if type(client) is not int or not 0 <= client < 1 << 31:
        raise CodecError("it names no client; start it with --node-config 'partition-id=0'")
    if type(examples) is not int or not 0 <= examples < 1 << 62:
        raise CodecError("its number of examples is not a count")
    if not isinstance(capacity, float) or not (math.isfinite(capacity) and 0 < capacity <= 1):
        raise CodecError("its capacity is not a share in (0, 1]")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CodecError("its config has no digest")
    clients = keys.get("clients", 0)
    if type(clients) is not int or not 0 <= clients < 1 << 31:
        raise CodecError("its number of clients is not a count")
    device, frozen = _device_of(keys.get("device", "")), keys.get("frozen", "")
    if not isinstance(frozen, str) or not re.fullmatch("([0-9a-f]{64})?", frozen):
        raise CodecError("the frozen part of its network has no hash")
    return Identity(
        client=client,
        examples=examples,
        capacity=capacity,
        digest=digest,
        device=device,
        frozen=frozen,
        clients=clients,
        sample=_sample_of(keys.get("sample", "")),
        simulated=keys.get("simulated") is True,
    )


def _device_of(text: object) -> DeviceRow | None:
    """The device in a node's answer, with every number checked; None if it reports none."""
    if text == "":
        return None
    try:
        row = DEVICE_ROW.validate_json(str(text)[:REASON_LIMIT], strict=True)
    except ValueError:
        raise CodecError("its device is not readable") from None
    return replace(row, name=clean(row.name))


def _sample_of(text: object) -> SampleSpec | None:
    """The description of samples in a node's answer; None if it has none."""
    if text == "":
        return None
    try:
        return SAMPLE_SPEC.validate_json(str(text)[:TEXT_LIMIT])
    except ValueError:
        raise CodecError("the description of its samples is not readable") from None


# --------------------------------------------------------------------------- what comes with a task


def settings_record(settings: str) -> ConfigRecord:
    """The settings of a run, for nodes that get them from the strategy."""
    return ConfigRecord({"text": settings})


def settings_text(content: RecordDict) -> str:
    """The inverse of `settings_record`; the text is not parsed yet."""
    record = content.get(SETTINGS)
    text = record.get("text") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > TEXT_LIMIT:
        raise CodecError("the message has no settings; is its strategy fedp3.flower.FedP3?")
    return text


def about_record(request: Request) -> ConfigRecord:
    """The fields of a message besides its task."""
    mechanism, permit = request.mechanism, request.permit
    return ConfigRecord(
        {
            "run": request.run,
            "mechanism": "" if mechanism is None else json.dumps(asdict(mechanism)),
            "permit": "" if permit is None else permit_text(permit),
        }
    )


def request_of(content: RecordDict) -> Request:
    """The inverse of `about_record`, with every field checked.

    The run names a folder on the node, so that only hex digits are allowed.
    """
    record = content.get(ABOUT)
    about: Mapping[str, object] = record if isinstance(record, ConfigRecord) else {}
    run, permit = about.get("run"), about.get("permit")
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run):
        raise CodecError("the task names no run")
    return Request(
        run=run,
        mechanism=_mechanism_of(about.get("mechanism")),
        permit=read_permit(permit) if isinstance(permit, str) and permit else None,
        bytes=len(frame_of(content)),
    )


def _mechanism_of(text: object) -> Mechanism | None:
    """The mechanism of a task, with every field checked; None without LDP."""
    if not text:
        return None
    try:
        fields = json.loads(str(text)[:REASON_LIMIT])
        mechanism = Mechanism(**fields)
        numbers = (mechanism.clip, mechanism.noise_multiplier, mechanism.sample_rate)
        valid = all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
    except (ValueError, TypeError):
        valid = False
    known = valid and mechanism.randomness in ("os", "seeded") and type(mechanism.ghost) is bool
    if not known:
        raise CodecError("the mechanism of a task is not readable")
    return mechanism
