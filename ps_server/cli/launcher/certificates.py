"""The certificates and tokens of a job that ps-run --tls starts: who gets which of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.security.roles import AccessRole
from ps_server.cli.launcher.events import ProcessName, ProcessRole

if TYPE_CHECKING:
    from ps_server.certs.folder import CertificateFolder

CERTIFICATES = "tls"
"""Name of their folder."""


def certificates_in(path: Path, shards: int, hosts: Sequence[str] = (), job: str = DEFAULT_JOB) -> CertificateFolder:
    """Made in ``path``; those of an earlier start are renewed, and its tokens stay. Raises ConfigError.

    ``hosts``: names and addresses of servers, beside those of this machine; ``job``: the name of the job.
    """
    from ps_server.certs.folder import CertificateFolder  # slow to import

    folder = CertificateFolder(path, job)
    if folder.authority_file.exists():
        folder.renew(shards, hosts)
    else:
        folder.make(shards, hosts)
    return folder


def security_environment(process: ProcessName, folder: CertificateFolder | None) -> Mapping[str, str]:
    """The variables of ``process``: its own certificate, and of tokens those it needs."""
    if folder is None:
        return {}
    match process.part:
        case ProcessRole.COORDINATOR:
            settings = folder.settings("coordinator")
        case ProcessRole.SHARD:
            settings = folder.settings(f"shard-{process.index}")
        case ProcessRole.WORKER:
            settings = folder.settings("worker", role=AccessRole.WORKER)
        case _:
            settings = folder.settings("reader", role=AccessRole.READER)
    return settings.environment
