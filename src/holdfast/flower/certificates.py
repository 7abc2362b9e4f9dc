"""Keys and certificates for TLS and node authentication: an authority, the server's certificate, the nodes' keys.

They are in the formats that Flower reads, as ``openssl`` and ``ssh-keygen`` would write them.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.core import files
from holdfast.core.errors import HoldfastError

DAYS = 365


def write_certificates(
    folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int = DAYS
) -> list[Path]:
    """Write the files that TLS and node authentication need; existing files are not replaced.

    ``hosts`` are the server's host names and addresses, ``nodes`` the sites' names. An existing authority in
    ``folder`` is reused, so that hosts and nodes can be added later. Returns the files written, of these:

        ca.crt, ca.key              the authority; every site gets ca.crt, nobody gets ca.key
        server.pem, server.key      the server's certificate and its key
        nodes/NAME, nodes/NAME.pub  a node's private key, for that node alone, and its public key, for the server
        superexec.secret            the secret by which the server's own processes authenticate
    """
    if not hosts:
        raise HoldfastError("a certificate needs the server's host names or addresses")
    with files.writing(folder):
        (folder / "nodes").mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def write(name: str, content: bytes, private: bool) -> None:
        path = folder / name
        with (
            files.writing(path),
            open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        ):
            file.write(content)
        if not private:
            path.chmod(0o644)
        written.append(path)

    if not (folder / "ca.crt").exists():
        key, certificate = _authority(days)
        write("ca.key", _pem(key), private=True)
        write("ca.crt", certificate.public_bytes(serialization.Encoding.PEM), private=False)
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signing = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    if not (folder / "server.pem").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        write("server.key", _pem(key), private=True)
        certificate = _server(key, hosts, authority, signing, days)
        write("server.pem", certificate.public_bytes(serialization.Encoding.PEM), private=False)
    for node in nodes:
        if not (folder / "nodes" / node).exists():
            key = ec.generate_private_key(ec.SECP384R1())
            write(f"nodes/{node}", _pem(key, serialization.PrivateFormat.OpenSSH), private=True)
            public = key.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
            write(f"nodes/{node}.pub", public + b"\n", private=False)
    if not (folder / "superexec.secret").exists():
        write("superexec.secret", secrets.token_urlsafe(48).encode(), private=True)
    return written


def _pem(
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> bytes:
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _authority(days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Holdfast federation")])
    certificate = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _server(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    signing: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    return (
        _builder(name, authority.subject, key, days)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signing, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
