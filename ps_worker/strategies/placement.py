"""Which replica of a data-parallel job this process is: from the variables of ps-run, torchrun or TF_CONFIG. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_protocol.cluster.replicas import STORE_VARIABLE
from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.errors import ConfigError

_COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Placement:
    """Replica ``rank`` of ``replicas``; on its host ``local_rank`` of ``local_replicas``."""

    rank: int = 0
    replicas: int = 1
    local_rank: int = 0
    local_replicas: int = 1
    #: As ``torch.distributed.init_process_group`` takes it; empty: there is one replica.
    rendezvous: str = ""


def placement(environ: Mapping[str, str]) -> Placement:
    """Where this process is; one replica where nothing says otherwise. Raises ConfigError naming what is wrong."""
    if environ.get("TF_CONFIG"):
        return _of_tf_config(TfConfig.parse(environ["TF_CONFIG"], needs_ps=False))
    if not environ.get("WORLD_SIZE") or not environ.get("RANK"):
        return Placement()
    rank, replicas = _count("RANK", environ), _count("WORLD_SIZE", environ)
    local_rank = _count("LOCAL_RANK", environ, rank)
    local_replicas = _count("LOCAL_WORLD_SIZE", environ, replicas)
    if rank >= replicas or local_rank >= local_replicas or local_replicas > replicas:
        raise ConfigError(
            "the variables of this replica do not fit together",
            expected="RANK below WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE",
            actual=", ".join(f"{name}={environ.get(name, '')}" for name in _COUNTS),
            remedy="start the script with ps-run --strategy or torchrun, which set them",
        )
    if replicas == 1:
        return Placement()
    return Placement(rank, replicas, local_rank, local_replicas, _rendezvous(environ))


def _rendezvous(environ: Mapping[str, str]) -> str:
    if environ.get(STORE_VARIABLE):
        return f"file://{environ[STORE_VARIABLE]}"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ConfigError(
                f"{name} is not set: the replicas cannot find each other",
                remedy="start the script with ps-run --strategy or torchrun, which set it",
            )
    return "env://"


def _count(name: str, environ: Mapping[str, str], default: int = 0) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is not a whole number from 0",
            actual=repr(text),
            remedy="start the script with ps-run --strategy or torchrun, which set it",
        )
    return int(text)


def _of_tf_config(tf: TfConfig) -> Placement:
    """A chief is worker 0, as in TensorFlow; the first of them listens at its address."""
    if tf.cluster.get("ps") or tf.task_type not in ("chief", "worker"):
        raise ConfigError(
            "this TF_CONFIG is not of a data-parallel job",
            expected="a cluster of workers without ps, and a task that is a worker or the chief",
            actual=f"task {tf.task_type} of a cluster of {', '.join(sorted(tf.cluster))}",
            remedy="use the strategy parameter_server, which has shards and evaluators",
        )
    members = [*tf.cluster.get("chief", ()), *tf.cluster.get("worker", ())]
    rank = tf.task_index + (len(tf.cluster.get("chief", ())) if tf.task_type == "worker" else 0)
    if len(members) == 1:
        return Placement()
    host = members[rank].rpartition(":")[0]
    local = [number for number, address in enumerate(members) if address.rpartition(":")[0] == host]
    return Placement(rank, len(members), local.index(rank), len(local), f"tcp://{members[0]}")
