"""Certificates of a test's own authority, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Authority", "Certificate", "tls_arguments", "tls_settings"]

_OF_A_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
_NEW_KEY = ("req", "-x509", *_OF_A_CURVE, "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True)
class Certificate:
    path: Path
    key_path: Path


class Authority:
    """Signs certificates of servers."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._own = self._make(name, [])
        self.path = self._own.path
        """The certificate that clients trust."""

    def certificate(self, name: str, subject_alt_name: str) -> Certificate:
        """`subject_alt_name`: for example "DNS:localhost,IP:127.0.0.1"."""
        signer = ["-CA", str(self._own.path), "-CAkey", str(self._own.key_path)]
        return self._make(name, [*signer, "-addext", f"subjectAltName={subject_alt_name}"])

    def _make(self, name: str, arguments: list[str]) -> Certificate:
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        files = ["-out", str(made.path), "-keyout", str(made.key_path), "-subj", f"/CN={name}"]
        subprocess.run(
            ["openssl", *_NEW_KEY, *files, *arguments], check=True, capture_output=True, timeout=60
        )
        return made


def tls_settings(port: int, certificate: Certificate) -> dict[str, str]:
    """The settings of a server or a Sentinel that listens with TLS."""
    return {
        "tls-port": str(port),
        "tls-cert-file": str(certificate.path),
        "tls-key-file": str(certificate.key_path),
        "tls-auth-clients": "no",
    }


def tls_arguments(port: int, certificate: Certificate) -> list[str]:
    """The same for a command line."""
    settings = tls_settings(port, certificate).items()
    return [part for name, value in settings for part in (f"--{name}", value)]
