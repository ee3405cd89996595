"""The options of what clients may take of a server, shared by ps-coordinator and ps-server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from ps_protocol.flags import flags
from ps_server.limits import JobLimits, ServerLimits

_Options = dict[str, tuple[click.ParamType[Any, Any], str]]

_COUNT = click.IntRange(1)
_SECONDS = click.FloatRange(0, min_open=True)

_EVERY_SERVER: _Options = {
    "max_connections": (_COUNT, "Open gRPC connections; one more is closed."),
    "max_peer_connections": (_COUNT, "Open gRPC connections of one host; one more is closed."),
    "max_handshakes": (_COUNT, "Connections that have not made a call; one more closes the oldest."),
    "max_streams": (_COUNT, "Calls at a time on one connection; clients wait with one more."),
    "max_calls": (_COUNT, "Calls in progress, streams included."),
    "max_peer_calls": (_COUNT, "Calls in progress of one host."),
    "max_metadata_bytes": (click.IntRange(4096), "Bytes of the headers of one call."),
    "handshake_seconds": (_SECONDS, "Time for a new connection to complete its handshake and make its first call."),
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

_BYTES = {
    "answer_mb": "Memory for answers to requests for rows or parameters; one client gets at most half of it.",
    "upload_mb": "Bytes of gradients, rows and values that clients are sending; one client has at most half of it.",
}

_JOB = {
    "max_models": "Models of the job.",
    "max_variables": "Variables of all models together.",
    "max_slices": "Slices of all models together.",
    "max_tables": "Tables of all models together.",
    "max_buckets": "Buckets of all tables together.",
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


def byte_limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets ``answer_mb`` and ``upload_mb`` (int); 0: a quarter of the memory of the machine."""
    for name, text in reversed(_BYTES.items()):
        command = click.option(
            _flag(name),
            name,
            type=click.IntRange(0),
            default=0,
            show_default="a quarter of the memory of the machine",
            metavar="MB",
            help=text,
        )(command)
    return command


def every_limit_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """For a program that starts servers: the command gets none of them, and passes ``limit_flags`` on."""
    names = [*_EVERY_SERVER, *_SHARD, *_BYTES, *_JOB]

    @functools.wraps(command)
    def without(*arguments: Any, **values: Any) -> Any:
        return command(*arguments, **{name: value for name, value in values.items() if name not in names})

    result: Callable[..., Any] = byte_limit_options(without)
    defaults = {each.name: each.default for kind in (ServerLimits, JobLimits) for each in fields(kind)}
    options = _EVERY_SERVER | _SHARD | {name: (_COUNT, text) for name, text in _JOB.items()}
    for name, (type_, text) in reversed(options.items()):
        result = click.option(_flag(name), name, type=type_, default=defaults[name], show_default=True, help=text)(
            result
        )
    return result


def limit_flags(context: click.Context) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The limits among those of ``every_limit_option`` that were set, as flags of a coordinator and of a shard."""

    def given(names: Iterable[str]) -> tuple[str, ...]:
        found = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
        return tuple(flags({name: context.params[name] for name in found}))

    return given([*_EVERY_SERVER, *_JOB]), given([*_EVERY_SERVER, *_SHARD, *_BYTES])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
            result = click.option(_flag(each), each, type=type_, default=defaults[each], show_default=True, help=text)(
                result
            )
        return result

    return decorate
