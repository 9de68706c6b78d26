"""A certificate authority of a test, and the certificates of servers that it signs: files in PEM."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority of a test")
        certificate = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def sign(self, cert: Path, key: Path, *, passphrase: bytes | None = None) -> int:
        """For a server at loopback; returns the certificate's number."""
        made = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = self._builder(_name("server of a test"), made)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        certificate = builder.sign(self._key, hashes.SHA256())
        cert.write_bytes(_pem(certificate))
        hidden = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase is not None
            else serialization.NoEncryption()
        )
        form = serialization.PrivateFormat.PKCS8
        key.write_bytes(made.private_bytes(serialization.Encoding.PEM, form, hidden))
        return certificate.serial_number

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - _DAY).not_valid_after(now + _DAY)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
