"""The configuration of one coordinator process, from the options of its command, TF_CONFIG and its journal."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ps_protocol.cluster.address import parse_metrics_port
from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.logs import EventLogger
from ps_protocol.security.settings import SecuritySettings
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import latest, listed, of_step
from ps_server.cli.options.checkpoint import CheckpointConfig, checkpoint_config, step_in
from ps_server.cli.options.mode import ModeOptions
from ps_server.coordinator.elasticity.engines.base import WorkerEngine
from ps_server.coordinator.elasticity.engines.find import find_engine
from ps_server.coordinator.elasticity.engines.kept_request import LAUNCHER
from ps_server.coordinator.elasticity.policy import ElasticSettings
from ps_server.coordinator.persistence.cluster_records import ClusterRecords
from ps_server.coordinator.persistence.saved_facts import saved_seed
from ps_server.coordinator.settings import ClusterSettings, PartitionOptions, check_consistency, partition_flags
from ps_server.limits import JobLimits, ServerLimits
from ps_server.serving.metrics import MetricsConfig
from ps_server.settings import configured, setting

logger = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of the engine, which starts and ends workers and shards for the coordinator."""

    engine: str | None = setting(
        None,
        "Who is asked for workers that are missing for 30 s, and for what psctl scale wants: launcher is the program "
        "that starts processes, launcher:workers one that starts workers only, launcher:lost one that starts lost "
        "workers again, kubernetes:JOB scales a Job by the account of this pod, file:PATH writes the request to a "
        "file, MODULE:CLASS is one of your own (docs/elasticity.md).",
        metavar="ENGINE",
        show_default="none",
    )
    engine_workers: int | None = setting(
        None,
        "How many workers the engine is asked for. Needed with --workers 0.",
        show_default="that of --workers",
    )
    engine_most: int | None = setting(
        None, "kubernetes: the highest parallelism that the Job is given.", show_default="twice as many"
    )


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The whole configuration of one coordinator process."""

    bind: str
    port: int
    ready_file: Path | None
    cluster: ClusterSettings
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    #: The checkpoint with the models' initial values.
    saved: Checkpoint | None = None
    #: Exit when the job is finished and its members have left.
    exit_when_finished: bool = False
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    #: Port of the page; 0: any free port, None: no page.
    page_port: int | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    elastic: ElasticSettings = field(default_factory=ElasticSettings)
    #: Starts missing workers.
    engine: WorkerEngine | None = None

    @property
    def words(self) -> dict[str, str]:
        """The settings of the job, by name, for people."""
        cluster, saves = self.cluster, self.checkpoints
        interval = "" if saves.seconds is None else f", every {saves.seconds:g} s"
        return {
            "job": cluster.job,
            "shards": str(cluster.expected_shards),
            "workers": _workers_text(cluster.identity.workers),
            "first mode": str(cluster.consistency),
            "partition": partition_flags(cluster.partition),
            "lease": f"{cluster.lease_seconds:g} s",
            "heartbeat": f"{cluster.heartbeat_seconds:g} s",
            "seed": str(cluster.seed),
            "moves by itself": "yes" if self.elastic.rebalance else "no",
            "workers from": self.engine.describe() if self.engine else "nobody is asked",
            "checkpoints": f"{saves.directory}{interval}" if saves.directory else "none",
            "restored from": str(self.saved.folder) if self.saved else "nothing",
            "torch-ps": version("torch-ps"),
        }


def configure(options: Mapping[str, Any], given: Set[str], kept: ClusterRecords | None) -> CoordinatorConfig:
    """The configuration of the command's ``options``; those that were not ``given`` come from ``kept``, the journal.

    Raises ConfigError when options contradict each other.
    """
    if kept is not None:
        options = {**options, **_from_journal(kept, given)}
    consistency = configured(ModeOptions, options).consistency(options["mode"])
    workers = WorkerRange.of(options["workers"])
    try:
        check_consistency(consistency, workers.least)
    except InvalidRequest as error:
        raise ConfigError(error.message, expected=error.expected, actual=error.actual, remedy=error.remedy) from error
    lease, heartbeat = options["lease_seconds"], options["heartbeat_seconds"]
    if heartbeat * 2 > lease:
        raise ConfigError(
            "a lease has to be longer than two heartbeats",
            expected="--lease-seconds at least twice --heartbeat-seconds",
            actual=f"{lease:g} s and {heartbeat:g} s",
        )
    security: SecuritySettings = options.get("security") or SecuritySettings()
    cluster = configured(
        ClusterSettings,
        options,
        expected_shards=options["shards"],
        expected_workers=workers.fixed,
        least_workers=0 if workers.fixed else workers.least,
        most_workers=workers.most if workers.bounded and not workers.fixed else 0,
        consistency=consistency,
        partition=configured(PartitionOptions, options).rule(options["shards"]),
        seed=secrets.randbits(32) if options["seed"] is None else options["seed"],
        # Above all incarnations of earlier coordinators, which admit fewer than a thousand members a second.
        first_incarnation=time.time_ns() // 1_000_000,
        clock_began=time.time() - time.monotonic(),
        job=security.job,
        job_id=(kept.identity.job_id if kept else "") or secrets.token_hex(8),
        limits=configured(JobLimits, options),
    )
    if kept is not None:
        if not given & {"partition", "partition_slices", "partition_bytes"}:
            cluster = replace(cluster, partition=kept.identity.partition)
        if "mode" in given and consistency != kept.consistency:
            logger.warning(
                "model.options",
                "the job stays in mode %s; --mode %s is ignored: change it with psctl mode",
                kept.consistency,
                consistency,
            )
    checkpoints = checkpoint_config(options)
    saved = _saved(checkpoints.restore, checkpoints.directory)
    if saved:
        checkpoints = replace(checkpoints, restored=saved.folder)
    if saved and kept is None and "seed" not in given:
        # The order of the data depends on it.
        cluster = replace(cluster, seed=saved_seed(saved))
    elastic, engine = _elasticity(options, workers)
    return configured(
        CoordinatorConfig,
        options,
        cluster=cluster,
        checkpoints=checkpoints,
        saved=saved,
        metrics=MetricsConfig(options["bind"], parse_metrics_port(options["metrics_port"])),
        limits=configured(ServerLimits, options),
        elastic=elastic,
        engine=engine,
    )


def _elasticity(options: Mapping[str, Any], workers: WorkerRange) -> tuple[ElasticSettings, WorkerEngine | None]:
    """The coordinator's automatic actions, and the engine that starts workers. Raises ConfigError."""
    chosen = configured(EngineOptions, options)
    if chosen.engine is None:
        if chosen.engine_workers or chosen.engine_most:
            raise ConfigError("--engine-workers and --engine-most need --engine")
        return configured(ElasticSettings, options, workers=0), None
    wanted = chosen.engine_workers or workers.least
    if not wanted and not chosen.engine.startswith(LAUNCHER):
        raise ConfigError("--engine needs the number of workers", remedy="give --workers or --engine-workers")
    most = chosen.engine_most or (workers.most if workers.bounded and not workers.fixed else 2 * wanted)
    if most < wanted:
        raise ConfigError("--engine-most is below the workers", expected=f"{wanted} or more", actual=str(most))
    return configured(ElasticSettings, options, workers=wanted), find_engine(chosen.engine, most)


def _saved(chosen: str | None, directory: Path | None) -> Checkpoint | None:
    """The checkpoint that --restore names. Raises ConfigError, DamagedData."""
    if not chosen:
        return None
    step = step_in(chosen)
    if chosen != "latest" and step is None:
        return Checkpoint.open(Path(chosen).absolute())
    if directory is None:
        raise ConfigError(f"--restore {chosen} needs a folder to look in", remedy="give --checkpoint-dir as well")
    if step is not None:
        return Checkpoint.open(of_step(directory, step).absolute())
    newest = latest(directory)
    if newest is None:
        logger.warning("checkpoint", "no checkpoint in %s yet: the job starts without one", directory)
        return None
    for older in listed(directory):
        if older.kept and older.step is not None and older.folder != newest:
            logger.warning(
                "checkpoint",
                "the job continues from %s, and %s was kept before it: %s; --restore step=%s goes back to that one",
                newest.name,
                older.folder.name,
                older.kept,
                older.step,
            )
    return Checkpoint.open(newest.absolute())


def _from_journal(kept: ClusterRecords, given: Set[str]) -> dict[str, Any]:
    """The journal's values of options that were not ``given``."""
    job = kept.identity
    values = {"shards": job.expected_shards, "workers": job.workers, "seed": job.seed}
    return {name: value for name, value in values.items() if name not in given}


def from_tf_config(text: str, given: set[str]) -> dict[str, Any]:
    """The values in TF_CONFIG of options that were not ``given``. Raises ConfigError when it cannot be read."""
    if not text:
        return {}
    task = TfConfig.parse(text)
    if task.task_type != "chief":
        program = {"ps": "ps-server"}.get(task.task_type, "the training script")
        raise ConfigError(
            f"ps-coordinator runs the chief; this TF_CONFIG says {task.task_type} {task.task_index}",
            remedy=f"run {program} with it, or unset TF_CONFIG to run the coordinator beside it by its flags",
        )
    # The engine that started the tasks may wait until all of them end.
    values: dict[str, Any] = {"shards": task.shards, "workers": task.workers, "exit_when_finished": True}
    if task.coordinator_address:
        host, _, port = task.coordinator_address.rpartition(":")
        # The chief's name may be that of a service in front of it, whose address a process cannot listen on.
        values |= {"bind": host if host in ("localhost", "127.0.0.1") else "0.0.0.0", "port": int(port)}
    return {name: value for name, value in values.items() if name not in given}


def _workers_text(workers: WorkerRange) -> str:
    if workers.bounded:
        return str(workers)
    return f"{workers.least} or more" if workers.least else "any number"
