"""The command psctl certs: makes a certificate authority, certificates and tokens for a laboratory."""

from __future__ import annotations

from pathlib import Path

import click

from ps_protocol.cluster.job import DEFAULT_JOB
from ps_server.cli.options.common import clean_errors
from ps_server.cli.options.security import job_option
from ps_server.cli.psctl.output import echo
from ps_server.settings import Finite

_HELP = """Make certificates and tokens in DIR: an authority, a certificate for the coordinator, for each shard and for
each role, and a file of tokens. Keys and tokens have mode 0600.

Give each process its own files:

\b
    ps-coordinator --tls-cert DIR/coordinator.pem --tls-key DIR/coordinator.key --tls-ca DIR/ca.pem
                   --token-file DIR/tokens --tls-require-client
    ps-server --shard 0 ... --tls-cert DIR/shard-0.pem --tls-key DIR/shard-0.key (and so on)
    PS_TLS_CERT=DIR/worker.pem PS_TLS_KEY=DIR/worker.key PS_TLS_CA=DIR/ca.pem
                   PS_TOKEN_FILE=DIR/worker.token python train.py

With --renew the certificates in DIR are replaced by new ones of the same authority; processes that run read them again.
With --new-tokens the tokens are replaced; servers accept the ones before, too, until --new-tokens --drop-old.
"""


@click.group()
def certs() -> None:
    """Make certificates and tokens."""


@certs.command(help=_HELP)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Number of shards.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Name or IP address under which servers are reached; repeat it for more. localhost is always one.",
)
@job_option("Name of the job. PS_JOB.  [default: job]")
@click.option(
    "--days",
    type=Finite(0, min_open=True),
    default=365.0,
    show_default=True,
    help="Days for which certificates are valid.",
)
@click.option("--renew", is_flag=True, help="Replace the certificates of an authority that exists.")
@click.option("--new-tokens", is_flag=True, help="Replace the tokens.")
@click.option("--drop-old", is_flag=True, help="With --new-tokens: servers accept the new ones alone.")
def init(
    folder: Path,
    shards: int,
    hosts: tuple[str, ...],
    job: str | None,
    days: float,
    renew: bool,
    new_tokens: bool,
    drop_old: bool,
) -> None:
    """Make certificates and tokens in a folder."""
    if drop_old and not new_tokens:
        raise click.UsageError("--drop-old is for --new-tokens")
    from ps_server.certs import CertificateFolder  # slow to import

    made = CertificateFolder(folder, job or DEFAULT_JOB)
    with clean_errors():
        paths = []
        if renew:
            paths += made.renew(shards, hosts, days)
        if new_tokens:
            paths += made.replace_tokens(keep=not drop_old)
        if not renew and not new_tokens:
            paths = made.make(shards, hosts, days)
    for path in paths:
        echo(str(path))
