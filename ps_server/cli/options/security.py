"""The options of TLS, tokens and who may connect, shared by every program."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ps_protocol.cluster.job import job_name
from ps_protocol.errors import ConfigError
from ps_protocol.security.settings import VARIABLES, BulkSecurity, SecuritySettings

_FILE = click.Path(dir_okay=False, path_type=Path)


def _job(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else job_name("--job or PS_JOB", text)
    except ConfigError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def job_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --job with ``text`` as its help: ``job``, None where it is not given."""
    return click.option("--job", metavar="NAME", envvar=VARIABLES["job"], callback=_job, help=text)


_EVERY_PROGRAM = (
    click.option(
        "--tls-cert",
        type=_FILE,
        envvar=VARIABLES["tls_cert"],
        help="PEM file with the certificate of this process, and the chain up to its authority. PS_TLS_CERT.",
    ),
    click.option(
        "--tls-key",
        type=_FILE,
        envvar=VARIABLES["tls_key"],
        help="PEM file with the private key of --tls-cert, mode 0600. PS_TLS_KEY.",
    ),
    click.option(
        "--tls-ca",
        type=_FILE,
        envvar=VARIABLES["tls_ca"],
        help="PEM file with the certificates of the authorities to trust. With it every connection uses TLS. "
        "PS_TLS_CA.",
    ),
    click.option(
        "--token-file",
        type=_FILE,
        envvar=VARIABLES["token_file"],
        help="File with lines role:name:secret, mode 0600. Servers accept every line; a client sends the first line of "
        "its role. PS_TOKEN_FILE.",
    ),
)

_SERVERS = (
    click.option(
        "--tls-require-client",
        "require_client",
        is_flag=True,
        envvar=VARIABLES["require_client"],
        help="Refuse connections without a certificate of an authority in --tls-ca. PS_TLS_REQUIRE_CLIENT.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        envvar=VARIABLES["insecure"],
        help="Listen beyond loopback also without TLS or without tokens: everybody who reaches this host is trusted. "
        "PS_INSECURE.",
    ),
    click.option(
        "--bulk-security",
        "bulk",
        type=click.Choice([each.value for each in BulkSecurity]),
        envvar=VARIABLES["bulk"],
        help="How the bulk transport protects payloads when TLS is on. token-only: not at all, for a network that "
        "nobody else can read or change. PS_BULK_SECURITY.  [default: tls]",
    ),
    click.option(
        "--shm-uid",
        type=click.IntRange(0),
        envvar=VARIABLES["shm_uid"],
        help="Number of another user whose processes may share memory with this one. PS_SHM_UID.",
    ),
    job_option(
        "Name of the job. The coordinator sends it to all members, for metrics, logs and the page; the certificates "
        "of servers name it. PS_JOB.  [default: job]"
    ),
    click.option(
        "--reflection/--no-reflection",
        default=None,
        envvar=VARIABLES["reflection"],
        help="Describe the services to tools such as grpcurl. PS_REFLECTION.  [default: unless callers are "
        "authenticated]",
    ),
)


def security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a client: the command gets ``security`` (SecuritySettings)."""
    return _with(_EVERY_PROGRAM, command)


def server_security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As ``security_options``, with the options of a server."""
    return _with(_EVERY_PROGRAM + _SERVERS, command)


def listener_security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of servers alone, for a command of psctl: ``security`` has those of psctl, too."""
    return _with(_SERVERS, command)


def _with(options: tuple[Callable[..., Any], ...], command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def gathered(*arguments: Any, **values: Any) -> Any:
        given = {name: values.pop(name) for name in _NAMES & values.keys()}
        given["bulk"] = BulkSecurity(given["bulk"]) if given.get("bulk") else None
        # Not an option: every user of the machine sees command lines.
        token = os.environ.get(VARIABLES["token"]) or None
        outer = click.get_current_context().find_object(SecuritySettings) or SecuritySettings()
        return command(*arguments, security=outer.with_given(**given, token=token), **values)

    for option in reversed(options):
        gathered = option(gathered)
    return gathered


_NAMES = VARIABLES.keys() - {"token"}
