"""The command ps-coordinator: reads flags, environment and files, and runs one coordinator until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model import Mode
from ps_protocol.tf_config import TfConfig
from ps_server import cli, serving
from ps_server.checkpoint import Checkpoint, latest
from ps_server.checkpoint_options import CheckpointConfig, checkpoint_config, checkpoint_options
from ps_server.cluster_options import cluster_options
from ps_server.coordinator.checkpoints import Checkpoints
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.ending import end_with_job
from ps_server.coordinator.job_limits import JobLimits
from ps_server.coordinator.journal import Journal
from ps_server.coordinator.memento import Memento, from_rows
from ps_server.coordinator.moves import Moves
from ps_server.coordinator.placement import Balanced, FixedShards, MaxSize, MinSize, PartitionRule
from ps_server.coordinator.saved_facts import saved_seed
from ps_server.coordinator.service import MAX_REQUEST_BYTES, SERVICE_NAME, CoordinatorService
from ps_server.coordinator.settings import ClusterSettings, check_consistency
from ps_server.mode_options import MODES, bound_options, consistency_of

logger = logging.getLogger(__name__)

DEFAULT_PORT = 7000


_HELP = """Run the coordinator of a parameter-server cluster.

It keeps the membership, places models on shards and opens barriers; no parameter passes through it. Start it
first, then the shards (ps-server) and the workers with its address:

\b
    ps-coordinator --shards 2 --workers 4 --mode sync
    ps-server --shard 0 --coordinator 127.0.0.1:7000
    PS_COORDINATOR=127.0.0.1:7000 python train.py

Values come from flags, else from the environment (PS_COORDINATOR_SHARDS, …), else from the --config file, else
from TF_CONFIG (--bind, --port, --shards, --workers and --exit-when-finished only), else from the defaults.

With --data-dir the coordinator may be killed and started again at any time: it goes on from its journal, its members
keep their places, and nobody joins again. --shards, --workers, --partition and --seed belong to the job: without them
the journal's values hold, and others are refused. The mode is the journal's too, for it may have been changed with
psctl mode; another --mode is reported and not taken. After the end of a job the next start begins a new run of it.

Exit codes: 0 after SIGINT or SIGTERM, 2 for a wrong configuration, 1 for any other error.
"""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Everything one coordinator process was told."""

    bind: str
    port: int
    ready_file: Path | None
    cluster: ClusterSettings
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    #: Where models come from that have not been placed yet.
    saved: Checkpoint | None = None
    #: End when the job is finished and its members have left.
    exit_when_finished: bool = False


async def serve(config: CoordinatorConfig, journal: Journal | None, stop: asyncio.Event) -> None:
    """Run one coordinator until ``stop`` is set. Raises ConfigError when its address cannot be listened on, DamagedData
    when a member proves that the journal is an older one, and what Driver raises.
    """
    driver = Driver(config.cluster, journal=journal, saved=config.saved)
    checkpoints = Checkpoints(driver, config.checkpoints)
    moves = Moves(driver, checkpoints.busy)
    service = CoordinatorService(driver, checkpoints, moves)
    server = await serving.start(config.bind, config.port, [(SERVICE_NAME, service.register)], MAX_REQUEST_BYTES)
    try:
        driver.start()
        view = driver.status().view
        workers = view.expected_workers or "any number of"
        logger.info(
            "coordinator serves at %s: %d shards, %s workers, %s",
            server.address,
            len(view.used_shards),
            workers,
            view.consistency,
        )
        if config.ready_file is not None:
            serving.write_ready_file(config.ready_file, server.address)
        running = asyncio.create_task(checkpoints.run(), name="checkpoints")
        ending = end_with_job(driver, checkpoints, stop if config.exit_when_finished else None)
        watching = asyncio.create_task(ending, name="end-with-job")
        ends = [asyncio.ensure_future(event.wait()) for event in (stop, driver.failed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for each in (*ends, watching):
            each.cancel()
        await moves.stop()
        if driver.failed.is_set():
            # A checkpoint would hold what an older journal says of data and phases.
            running.cancel()
            driver.check_failed()
        checkpoints.stop()
        await running
    finally:
        # Watch streams end first; the server then has no call to wait for.
        await driver.close()
        await server.stop()


@click.command(
    help=_HELP,
    context_settings={"auto_envvar_prefix": "PS_COORDINATOR", "show_default": True, "max_content_width": 100},
)
@cli.server_options(DEFAULT_PORT)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="nothing is kept",
    help="Folder of the journal, made where it is missing, for this job alone; a coordinator started with it again "
    "goes on where the last one ended.",
)
@click.option(
    "--accept-older-journal",
    is_flag=True,
    help="Go on although the journal in --data-dir lacks commits that were on disk: an older copy of it, or one whose "
    "end is damaged. What they held is forgotten: members that joined, models that were declared, moves, the mode.",
)
@click.option(
    "--shards",
    type=click.IntRange(1),
    default=1,
    help="Number of shards the job begins with; ps-server --add adds more.",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    default=0,
    help="Number of workers the job waits for before it starts; 0: they come and go, nobody is waited for.",
)
@click.option(
    "--mode",
    type=MODES,
    default=Mode.ASYNC.value,
    help="async: apply on arrival. ssp: async, with a bound on how far workers drift apart. sync: average all workers' "
    "gradients of a step.",
)
@bound_options
@cluster_options
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), show_default="random", help="Common seed of the job.")
@cli.exit_option
@checkpoint_options
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Entry point of ps-coordinator."""
    cli.configure_logging(options["log_level"])
    with cli.clean_errors():
        given = {name for name in options if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)}
        told = _from_tf_config(os.environ.get("TF_CONFIG", ""), given)
        folder: Path | None = options["data_dir"]
        older = options["accept_older_journal"]
        with nullcontext() if folder is None else Journal.open(folder, accept_older=older) as journal:
            kept = from_rows(journal.read(), str(journal.path)) if journal else None
            config = configure({**options, **told}, given | told.keys(), kept)
            serving.run(lambda stop: serve(config, journal, stop))


def configure(options: Mapping[str, Any], given: Set[str], kept: Memento | None) -> CoordinatorConfig:
    """The typed configuration of the command's ``options``; what was not ``given`` comes from ``kept``, the journal.

    Raises ConfigError when options contradict each other.
    """
    if kept is not None:
        options = {**options, **_from_journal(kept, given)}
    consistency = consistency_of(
        options["mode"],
        options["staleness"],
        options["backup"],
        options["grace_seconds"],
        options["stale_policy"],
        options["stale_threshold"],
    )
    try:
        check_consistency(consistency, options["workers"])
    except InvalidRequest as error:
        raise ConfigError(error.message, expected=error.expected, actual=error.actual, remedy=error.remedy) from error
    lease, heartbeat = options["lease_seconds"], options["heartbeat_seconds"]
    if heartbeat * 2 > lease:
        raise ConfigError(
            "a lease must outlast a lost heartbeat",
            expected="--lease-seconds at least twice --heartbeat-seconds",
            actual=f"{lease:g} s and {heartbeat:g} s",
        )
    cluster = ClusterSettings(
        expected_shards=options["shards"],
        expected_workers=options["workers"],
        consistency=consistency,
        partition=_partition_rule(options),
        lease_seconds=lease,
        heartbeat_seconds=heartbeat,
        seed=secrets.randbits(32) if options["seed"] is None else options["seed"],
        # Above every incarnation of an earlier coordinator on this cluster: none joins a thousand members a second.
        first_incarnation=time.time_ns() // 1_000_000,
        limits=JobLimits(max_model_bytes=options["max_model_bytes"]),
    )
    if kept is not None:
        if not given & {"partition", "partition_slices", "partition_bytes"}:
            cluster = replace(cluster, partition=kept.identity.partition)
        if "mode" in given and consistency != kept.consistency:
            logger.warning(
                "the job is in mode %s and stays there, not in %s: change it with psctl mode",
                kept.consistency,
                consistency,
            )
    checkpoints = checkpoint_config(
        options["checkpoint_dir"],
        options["checkpoint_seconds"],
        options["checkpoint_keep"],
        options["checkpoint_full_every"],
    )
    saved = _saved(options["restore"], checkpoints.directory)
    if saved and kept is None and "seed" not in given:
        # The order of the data depends on it.
        cluster = replace(cluster, seed=saved_seed(saved))
    exits = bool(options["exit_when_finished"])
    return CoordinatorConfig(
        options["bind"], options["port"], options["ready_file"], cluster, checkpoints, saved, exits
    )


def _saved(chosen: str | None, directory: Path | None) -> Checkpoint | None:
    """The checkpoint that --restore names. Raises ConfigError, DamagedData."""
    if not chosen:
        return None
    if chosen != "latest":
        return Checkpoint.open(Path(chosen).absolute())
    if directory is None:
        raise ConfigError("--restore latest needs a folder to look in", remedy="give --checkpoint-dir, too")
    newest = latest(directory)
    if newest is None:
        logger.warning("no checkpoint in %s yet: the job begins anew", directory)
        return None
    return Checkpoint.open(newest.absolute())


def _from_journal(kept: Memento, given: Set[str]) -> dict[str, Any]:
    """The journal's values of options that were not ``given``."""
    job = kept.identity
    values = {"shards": job.expected_shards, "workers": job.expected_workers, "seed": job.seed}
    return {name: value for name, value in values.items() if name not in given}


def _partition_rule(options: Mapping[str, Any]) -> PartitionRule:
    slices, nbytes, shards = options["partition_slices"], options["partition_bytes"], options["shards"]
    match options["partition"]:
        case "fixed":
            return FixedShards(slices or shards)
        case "min":
            return MinSize(nbytes, slices or shards)
        case "max":
            return MaxSize(nbytes, slices)
        case _:
            return Balanced()


def _from_tf_config(text: str, given: set[str]) -> dict[str, Any]:
    """What TF_CONFIG says about options that were not ``given``. Raises ConfigError when it cannot be read."""
    if not text:
        return {}
    told = TfConfig.parse(text)
    if told.task_type != "chief":
        program = {"ps": "ps-server"}.get(told.task_type, "the training script")
        raise ConfigError(
            f"ps-coordinator runs the chief; this TF_CONFIG says {told.task_type} {told.task_index}",
            remedy=f"run {program} with it, or unset TF_CONFIG to run the coordinator beside it by its flags",
        )
    # An engine that started the tasks may wait for them all.
    values: dict[str, Any] = {"shards": told.shards, "workers": told.workers, "exit_when_finished": True}
    if told.coordinator_address:
        host, _, port = told.coordinator_address.rpartition(":")
        # The chief's name may be that of a service in front of it, which nobody can listen on.
        values |= {"bind": host if host in ("localhost", "127.0.0.1") else "0.0.0.0", "port": int(port)}
    return {name: value for name, value in values.items() if name not in given}


def program() -> NoReturn:
    """The process of ps-coordinator."""
    cli.run_program(main)


if __name__ == "__main__":
    program()
