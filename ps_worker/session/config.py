"""The configuration of a worker process, from arguments and environment, in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from ps_protocol import times
from ps_protocol.cluster.address import METRICS_OFF, is_service_link, parse_metrics_port, split_address
from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.cluster.transport import Transport
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.text import whole_number
from ps_worker.times import TERMINATION_SECONDS

_REMEDY = "start the script with torchrun, which sets RANK and WORLD_SIZE, or set PS_RANK, which wins, or unset both"


def hinted_rank(environ: Mapping[str, str]) -> int | None:
    """``RANK``, where ``WORLD_SIZE`` is set as well. Raises ConfigError for numbers that do not fit together."""
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    rank, replicas = _count("RANK", environ), _count("WORLD_SIZE", environ)
    if rank >= replicas:
        raise ConfigError(
            "RANK is not below WORLD_SIZE", expected=f"0 to {replicas - 1}", actual=str(rank), remedy=_REMEDY
        )
    return rank


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether torchrun has started this script more than once. Raises ConfigError."""
    return hinted_rank(environ) is not None and _count("WORLD_SIZE", environ) > 1


def with_host(address: str, environ: Mapping[str, str]) -> str:
    """``address``; one that is a port alone, as ":7000", gets the host ``MASTER_ADDR``."""
    host = environ.get("MASTER_ADDR", "")
    if not address.startswith(":") or whole_number(address[1:]) is None or not host:
        return address
    return f"[{host}]{address}" if ":" in host else f"{host}{address}"


def _count(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if (count := whole_number(text)) is None:
        raise ConfigError(f"{name} is not a whole number from 0", actual=repr(text), remedy=_REMEDY)
    return count


PerHost = bool | Literal["sync"]

T = TypeVar("T")


_SHM, _BULK = Transport.SHM, Transport.BULK

#: The choices, and the side channels each tries in order; the last resort is gRPC.
TRANSPORTS: Mapping[str, Sequence[Transport]] = MappingProxyType(
    {"auto": (_SHM, _BULK), "shm": (_SHM, _BULK), "bulk": (_BULK,), "grpc": ()}
)

_ROLES = MappingProxyType({"worker": Role.WORKER, "evaluator": Role.EVALUATOR})
_PROGRAMS = MappingProxyType({"ps": "ps-server", "chief": "ps-coordinator"})


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of ``connect``. ``rank`` None: the coordinator gives the lowest free one."""

    #: host:port of the coordinator.
    coordinator: str
    role: Role = Role.WORKER
    rank: int | None = None
    #: A torch device such as "cuda:1"; None: a GPU where there is one.
    device: str | None = None
    #: How long to wait for the coordinator and for the cluster to be complete.
    connect_timeout_seconds: float = times.PATIENCE_SECONDS
    #: How long to wait for a coordinator or shard that went away.
    reconnect_timeout_seconds: float = times.PATIENCE_SECONDS
    #: The transport to try first: one of ``TRANSPORTS``.
    transport: str = "auto"
    #: Take the rank from a process that may still run.
    take_over: bool = False
    #: Where this process serves its metrics; port 0: any free one, None: nowhere.
    metrics_bind: str = "127.0.0.1"
    metrics_port: int | None = None
    security: SecuritySettings = field(default_factory=SecuritySettings)
    #: How long SIGTERM waits for the end of a step.
    termination_seconds: float = TERMINATION_SECONDS
    #: Push together with the other workers of this host; "sync": while each step is one update of all workers.
    per_host: PerHost = False
    #: The file for liveness probes; it is touched while this process is a member and its threads run.
    alive_file: Path | None = None

    def opened_security(self, *, listens: bool = False) -> Security:
        """TLS and tokens from the files that ``security`` names. ``listens``: for a server. Raises ConfigError."""
        role = AccessRole.WORKER if self.role is Role.WORKER else AccessRole.READER
        return Security(self.security, role, listens=listens)

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str],
        *,
        coordinator: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        device: str | None = None,
        transport: str | None = None,
        connect_timeout_seconds: float | None = None,
        reconnect_timeout_seconds: float | None = None,
        security: SecuritySettings | None = None,
        per_host: PerHost | None = None,
    ) -> WorkerConfig:
        """Argument, else ``PS_*``, else ``TF_CONFIG``, else torchrun's variables, else default.

        Raises ConfigError naming what is wrong.
        """
        environ = {name: value for name, value in environ.items() if value and not is_service_link(value)}
        tf = TfConfig.parse(environ["TF_CONFIG"]) if "TF_CONFIG" in environ else None
        stated_role = role or environ.get("PS_ROLE")
        chosen_role = _role(stated_role, tf)
        # The index of a TF_CONFIG task does not apply to a process with another role.
        tf_rank = tf.task_index if tf and tf.task_type == chosen_role.value else None
        chosen_rank = _first(_number("rank", rank, int), _number("PS_RANK", environ.get("PS_RANK"), int), tf_rank)
        if chosen_rank is None and tf is None and chosen_role is Role.WORKER:
            chosen_rank = hinted_rank(environ)
        return cls(
            coordinator=_coordinator(coordinator or environ.get("PS_COORDINATOR"), tf, environ),
            role=chosen_role,
            rank=chosen_rank,
            device=device or environ.get("PS_DEVICE"),
            take_over=_switch("PS_TAKE_OVER", environ),
            metrics_bind=environ.get("PS_METRICS_BIND", "127.0.0.1"),
            metrics_port=parse_metrics_port(environ.get("PS_METRICS_PORT", METRICS_OFF), "PS_METRICS_PORT"),
            transport=_transport(transport or environ.get("PS_TRANSPORT") or "auto"),
            connect_timeout_seconds=connect_timeout(environ, connect_timeout_seconds),
            reconnect_timeout_seconds=_seconds(
                environ, "PS_RECONNECT_TIMEOUT", reconnect_timeout_seconds, times.PATIENCE_SECONDS
            ),
            termination_seconds=_seconds(environ, "PS_TERMINATION_SECONDS", None, TERMINATION_SECONDS),
            alive_file=Path(environ["PS_ALIVE_FILE"]) if "PS_ALIVE_FILE" in environ else None,
            security=security or SecuritySettings.from_environment(environ),
            per_host=_per_host(environ) if per_host is None else per_host,
        )


def runs_alone(
    environ: Mapping[str, str], role: str | None, rank: int | None, security: SecuritySettings | None
) -> bool:
    """Whether nothing names a job for this worker: no address, role, rank, certificate or token, and no
    torchrun that started several.
    """
    named = ("PS_COORDINATOR", "TF_CONFIG", "PS_ROLE", "PS_RANK")
    if any(environ.get(name) for name in named) or (role, rank, security) != (None, None, None):
        return False
    if is_one_of_several(environ):
        return False
    return SecuritySettings.from_environment(environ) == SecuritySettings()


def connect_timeout(environ: Mapping[str, str], argument: float | None) -> float:
    """Seconds to wait for the cluster to be complete. Raises ConfigError."""
    given = {name: value for name, value in environ.items() if value}
    return _seconds(given, "PS_CONNECT_TIMEOUT", argument, times.PATIENCE_SECONDS)


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _coordinator(stated: str | None, tf: TfConfig | None, environ: Mapping[str, str]) -> str:
    address = with_host(stated, environ) if stated else (tf.coordinator_address if tf else None)
    if address is None:
        why = ": TF_CONFIG has no chief" if tf else ""
        if tf is None and is_one_of_several(environ):
            why = ": torchrun names none"
        raise ConfigError(
            "the coordinator's address is not known" + why,
            expected="host:port",
            remedy="start the script with ps-run, or set PS_COORDINATOR, or set TF_CONFIG with a chief, "
            "or call connect('host:port')",
        )
    split_address(address, setting="the argument of connect(), PS_COORDINATOR or TF_CONFIG")
    return address


def _role(stated: str | None, tf: TfConfig | None) -> Role:
    if stated is None and tf is not None and tf.task_type in _PROGRAMS:
        program = _PROGRAMS[tf.task_type]
        raise ConfigError(
            f"this task is {tf.task_type} {tf.task_index} of TF_CONFIG: {program} belongs here, not a training script",
            expected="task.type worker or evaluator",
            actual=tf.task_type,
            remedy=f"start {program} with this TF_CONFIG",
        )
    name = stated or (tf.task_type if tf else "worker")
    if name not in _ROLES:
        raise ConfigError(
            "unknown role",
            expected=" or ".join(_ROLES),
            actual=name,
            remedy="correct the role argument of connect() or PS_ROLE",
        )
    return _ROLES[name]


def _switch(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{name} is not 0 or 1", actual=repr(value), remedy=f"correct {name} or leave it out")
    return value == "1"


def _per_host(environ: Mapping[str, str]) -> PerHost:
    value = environ.get("PS_PER_HOST", "0")
    if value not in ("0", "1", "sync"):
        raise ConfigError(
            "PS_PER_HOST is not 0, 1 or sync", actual=repr(value), remedy="correct PS_PER_HOST or leave it out"
        )
    return "sync" if value == "sync" else value == "1"


def _transport(name: str) -> str:
    if name not in TRANSPORTS:
        raise ConfigError(
            "unknown transport",
            expected=", ".join(TRANSPORTS),
            actual=repr(name),
            remedy="correct the transport argument of connect() or PS_TRANSPORT",
        )
    return name


def _number(name: str, value: object, convert: Callable[..., T]) -> T | None:
    """``value`` from 0 as a number; None stays None. Raises ConfigError naming the setting."""
    if value is None:
        return None
    try:
        number = convert(value)
        if number >= 0 and number < float("inf"):  # type: ignore[operator]  # int and float compare
            return number
    except (TypeError, ValueError):
        pass
    kind = "whole number" if convert is int else "number"
    raise ConfigError(f"{name} is not a {kind} from 0", actual=repr(value), remedy=f"correct {name} or leave it out")


def _seconds(environ: Mapping[str, str], name: str, argument: float | None, default: float) -> float:
    argument_name = name.removeprefix("PS_").lower() + "_seconds"
    given = _first(_number(argument_name, argument, float), _number(name, environ.get(name), float))
    return default if given is None else given
