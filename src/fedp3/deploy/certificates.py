"""Certificates and keys for a SuperLink and its SuperNodes.

There is one authority, one certificate for the server, and one key per node.
"""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 365


def make_certificates(folder: Path, host: str) -> None:
    """Write ca.crt, server.pem and server.key for a server at this address.

    Existing files that are valid stay, so that nodes which trust them need no new ones.
    """
    if _are_valid(folder, host):
        return
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    name = _name("fedp3 authority")
    basic = x509.BasicConstraints(ca=True, path_length=0)
    usage = _usage(signs_certificates=True)
    ca = (
        _builder(name, name, authority)
        .add_extension(basic, critical=True)
        .add_extension(usage, critical=True)
        .sign(authority, hashes.SHA256())
    )
    server = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName(_addresses(host))
    leaf = (
        _builder(_name("fedp3 server"), name, server)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .sign(authority, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", server, serialization.PrivateFormat.PKCS8)


def _are_valid(folder: Path, host: str) -> bool:
    """Whether the certificates in this folder are for this address, and valid for another day."""
    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        leaf = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
        leaf.verify_directly_issued_by(ca)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False  # they do not exist, or a crash left them incomplete
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    lasts = leaf.not_valid_after_utc > tomorrow
    return lasts and leaf.public_key() == key.public_key() and set(_addresses(host)) <= set(names)


def make_node_key(path: Path) -> None:
    """Write a node's key in OpenSSH's format: PATH is private, PATH.pub is to be registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _write_private(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _addresses(host: str) -> list[x509.GeneralName]:
    """The names in the server's certificate: this host, and loopback."""
    loopback: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    return loopback if address in loopback else [*loopback, address]
