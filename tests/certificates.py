"""A certificate for 127.0.0.1, by the openssl of the system."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(certificate: Path, key: Path) -> None:
    """Write both files. It signs itself, so whoever trusts it needs only this file."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
