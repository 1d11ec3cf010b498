"""Further doors of a server beside plain HTTP: TLS, gRPC, and shared memory."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from tessella.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Doors:
    """How clients may come, beside HTTP.

    Attributes:
        grpc_port: where gRPC listens; None is nowhere.
        tls_cert, tls_key: PEM files, for HTTP and gRPC; both or none.
        shared_memory: clients on this host may name tensors in shared memory of this user.

    Raises:
        UsageError: a certificate without its key, a port that is none.
    """

    grpc_port: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    shared_memory: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError(
                "TLS needs a certificate and its key", fix="give --tls-cert and --tls-key"
            )

    @property
    def scheme(self) -> str:
        """Of the server's URL."""
        return "http" if self.tls_cert is None else "https"

    def check(self) -> None:
        """Raise ``UsageError`` if the certificate cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                "the certificate cannot be used",
                seen=f"{self.tls_cert}, {self.tls_key}: {error}",
                fix="give a certificate and the key that belongs to it, both as PEM",
            ) from error


HTTP_ONLY = Doors()
