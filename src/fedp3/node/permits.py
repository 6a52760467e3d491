"""Permits: a run owner's signature over a run, its config and an expiry, made off the server.

A node whose policy lists owners' keys acts only on tasks with such a permit.  A server that was
taken over can then neither start another run nor change the config of a permitted one.
"""

import json
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError
from fedp3.node.refusal import RefusalCode, Refused

SIZE_LIMIT = 2000  # characters of a permit in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """A permission to run one config.

    Args:
        run: the name of the run on the nodes.
        config: the digest of its config.
        expires: when the permission ends, in seconds since 1970, UTC.
        owner: the public key that signed it, in hex.
        signature: an Ed25519 signature over the three fields above, in hex.
    """

    run: str
    config: str
    expires: int
    owner: str
    signature: str

    @property
    def until(self) -> str:
        """When it ends, for people."""
        return datetime.fromtimestamp(self.expires, UTC).isoformat(timespec="minutes")


def make_owner_key(path: Path) -> str:
    """Write a new private key; returns the public key for the policies of nodes, in hex."""
    ed25519, _ = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(key.private_bytes_raw().hex() + "\n")
    return str(key.public_key().public_bytes_raw().hex())


def sign_permit(key_file: Path, config: str, expires: int, run: str = "") -> Permit:
    """Permit one run of a config.

    Args:
        key_file: the owner's private key.
        config: the digest of the config.
        expires: when the permission ends, in seconds since 1970, UTC.
        run: the name of the run; a new one by default.
    """
    ed25519, _ = _cryptography()
    try:
        key = ed25519.Ed25519PrivateKey.from_private_bytes(
            bytes.fromhex(key_file.read_text().strip())
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the key {key_file}: {error}; make one with: fedp3 permit key"
        ) from None
    run = run or secrets.token_hex(16)
    return Permit(
        run=run,
        config=config,
        expires=expires,
        owner=key.public_key().public_bytes_raw().hex(),
        signature=key.sign(_signed(run, config, expires)).hex(),
    )


def check_permit(
    permit: Permit | None, owners: Collection[str], run: str, config: str, now: float
) -> None:
    """Refuse a task whose run was not permitted by one of these owners.

    Args:
        permit: the permit of the message, if it has one.
        owners: public keys, in hex; without any, no permit is needed.
        run: the run of the message.
        config: the digest of the node's config.
        now: seconds since 1970, UTC.
    """
    if not owners:
        return
    if permit is None:
        raise Refused(RefusalCode.PERMIT, "the task carries no permit, and the policy needs one")
    if permit.owner not in owners:
        raise Refused(RefusalCode.PERMIT, f"the policy does not list the owner {permit.owner[:16]}")
    if (permit.run, permit.config) != (run, config):
        raise Refused(RefusalCode.PERMIT, "the permit is for another run or another config")
    if permit.expires < now:
        raise Refused(RefusalCode.PERMIT, f"the permit ended at {permit.until}")
    ed25519, invalid = _cryptography()
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(permit.owner))
        key.verify(bytes.fromhex(permit.signature), _signed(run, config, permit.expires))
    except (invalid, ValueError):
        raise Refused(RefusalCode.PERMIT, "the signature of the permit is not valid") from None


def permit_text(permit: Permit) -> str:
    """A permit as JSON, for its file and for messages."""
    return json.dumps(asdict(permit))


def read_permit(text: str) -> Permit:
    """The inverse of `permit_text`, with every field checked."""
    try:
        fields = json.loads(text[:SIZE_LIMIT])
        permit = Permit(**fields)
    except (ValueError, TypeError):
        raise Refused(RefusalCode.PERMIT, "the permit is not readable") from None
    texts = (permit.run, permit.config, permit.owner, permit.signature)
    if not all(isinstance(text, str) for text in texts) or type(permit.expires) is not int:
        raise Refused(RefusalCode.PERMIT, "the permit has fields of a wrong type")
    return permit


def _signed(run: str, config: str, expires: int) -> bytes:
    return f"fedp3 permit\nrun {run}\nconfig {config}\nexpires {expires}\n".encode()


def _cryptography() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise InputError(
            "permits need the package cryptography; add it with: pip install 'fedp3[flower]'"
        ) from None
    return ed25519, InvalidSignature
