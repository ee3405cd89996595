"""The options of what clients may take of a server, shared by ps-coordinator and ps-server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from ps_server.limits import JobLimits, ServerLimits

_Options = dict[str, tuple[click.ParamType[Any, Any], str]]

_COUNT = click.IntRange(1)
_SECONDS = click.FloatRange(0, min_open=True)

_EVERY_SERVER: _Options = {
    "max_connections": (_COUNT, "Open gRPC connections; one more is closed at once."),
    "max_streams": (_COUNT, "Calls at a time on one connection; clients wait with one more."),
    "max_calls": (_COUNT, "Calls in progress, streams included."),
    "max_peer_calls": (_COUNT, "Calls in progress of one host."),
    "max_metadata_bytes": (click.IntRange(4096), "Bytes of the headers of one call."),
    "handshake_seconds": (_SECONDS, "Time for a new connection to complete its handshake."),
}

_SHARD: _Options = {
    "first_message_seconds": (_SECONDS, "Time for a call to send its first message."),
    "max_feeds": (_COUNT, "Streams that follow the changes of tables."),
    "max_peer_feeds": (_COUNT, "Streams of one host that follow the changes of tables."),
    "max_side_handshakes": (
        _COUNT,
        "Connections to the bulk and shm transports that have not shown their token; one more closes the oldest.",
    ),
    "token_seconds": (_SECONDS, "Time for such a connection to complete its handshake and show its token."),
}

_JOB = {
    "max_models": "Models of the job.",
    "max_variables": "Variables of all models together.",
    "max_tables": "Tables of all models together.",
    "max_name_bytes": "Bytes of the name of a model, table, dataset or optimizer. Names of variables may have 16 "
    "times as many.",
}


def server_limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets ``limits`` (ServerLimits)."""
    return _gathering(ServerLimits, "limits", _EVERY_SERVER)(command)


def shard_limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As ``server_limit_options``, with those that only a shard has."""
    return _gathering(ServerLimits, "limits", _EVERY_SERVER | _SHARD)(command)


def job_limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets ``job_limits`` (JobLimits), without the limit that ``--max-model-bytes`` sets."""
    return _gathering(JobLimits, "job_limits", {name: (_COUNT, text) for name, text in _JOB.items()})(command)


def _gathering(
    kind: type[ServerLimits] | type[JobLimits], name: str, options: _Options
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    defaults = {each.name: each.default for each in fields(kind)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def gathered(*arguments: Any, **values: Any) -> Any:
            given = {each: values.pop(each) for each in options}
            return command(*arguments, **{name: kind(**given)}, **values)

        result: Callable[..., Any] = gathered
        for each, (type_, text) in reversed(options.items()):
            flag = f"--{each.replace('_', '-')}"
            result = click.option(flag, each, type=type_, default=defaults[each], show_default=True, help=text)(result)
        return result

    return decorate
