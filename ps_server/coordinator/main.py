"""The command ps-coordinator: runs one coordinator until a signal stops it."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ps_protocol.client.coordinator import EXIT_UNSAVED
from ps_protocol.cluster.history import JobHistory
from ps_protocol.errors import PsError
from ps_protocol.launch.life import showing_life, take_life_pipe
from ps_protocol.logs import EventLogger, LogFormat, configure_logging, describe_process
from ps_protocol.metrics.call_on_loop import call_on_loop
from ps_protocol.metrics.server import JOB_LABEL, MetricsServer
from ps_protocol.model.spec import Mode
from ps_protocol.security.expiry import ExpiryWatch
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_server.checkpoint.files import check_writable
from ps_server.cli.options import common
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.options.mode import MODES, ModeOptions
from ps_server.cli.options.security import server_security_options
from ps_server.coordinator.access import CoordinatorAccess
from ps_server.coordinator.config import CoordinatorConfig, EngineOptions, configure, from_tf_config
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.engines.kept_request import KeptRequest
from ps_server.coordinator.elasticity.policy import ElasticSettings
from ps_server.coordinator.elasticity.runner import ElasticityRunner
from ps_server.coordinator.elasticity.scaling import JobScaling
from ps_server.coordinator.history.history_file import HistoryFile
from ps_server.coordinator.history.recorder import JobRecorder
from ps_server.coordinator.jobs.checkpoints import CheckpointMade, Checkpoints
from ps_server.coordinator.jobs.ending import end_with_job
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.jobs.publish_runner import PublishRunner
from ps_server.coordinator.membership.admission import MOST_SHARDS
from ps_server.coordinator.metrics import COORDINATOR, CoordinatorMetrics, targets
from ps_server.coordinator.persistence.cluster_records import from_rows
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.service import MAX_REQUEST_BYTES, SERVICE_NAME, CoordinatorService
from ps_server.coordinator.settings import ClusterSettings, PartitionOptions
from ps_server.limits import JobLimits, LimitCounts, ServerLimits
from ps_server.page.needs import check_libraries
from ps_server.serving import grpc_server
from ps_server.serving.metrics import MetricsConfig, metrics_option, serve_metrics
from ps_server.settings import options, was_given
from ps_server.tasks import first_of

if TYPE_CHECKING:
    from ps_server.page.server import PageServer

logger = EventLogger(__name__)

DEFAULT_PORT = 7000


_HELP = """Run the coordinator of a parameter-server cluster.

The coordinator admits members, places models on shards and opens barriers. Parameters do not pass through it. Start it
first, then start the shards (ps-server) and the workers with its address:

\b
    ps-coordinator --shards 2 --workers 4 --mode sync
    ps-server --shard 0 --coordinator 127.0.0.1:7000
    PS_COORDINATOR=127.0.0.1:7000 python train.py

The value of an option is taken from the first of these that has one: the command line, the environment
(PS_COORDINATOR_SHARDS, …), the --config file, TF_CONFIG (only --bind, --port, --shards, --workers and
--exit-when-finished), the default.

With --data-dir the coordinator can be killed and restarted at any time. It continues from its journal, and its members
stay members. --shards, --workers, --partition and --seed are fixed for a job: they are read from the journal, and other
values are an error. The mode is read from the journal, too, because psctl mode may have changed it; a different --mode
is logged and ignored. After the end of a job, the next start begins a new run of it.

Exit codes: 0 after SIGINT or SIGTERM, 2 for a wrong configuration, 74 when the last checkpoint was not written, 1 for
any other error.
"""


async def serve(
    config: CoordinatorConfig, journal: Journal | None, stop: asyncio.Event, unsaved: list[PsError] | None = None
) -> None:
    """Run one coordinator until ``stop`` is set. ``unsaved`` gets the reason why the last checkpoint was not written.

    Raises ConfigError when it cannot listen on its address, DamagedData when a member proves that the journal is an
    older one, and the errors of Driver.
    """
    security = Security(config.security, AccessRole.SERVER, listens=True)
    access = CoordinatorAccess.of(security, journal.path.parent if journal else None)
    driver = Driver(config.cluster, journal=journal, saved=config.saved, open_shard=access.open_shard)
    driver.certificate_ends = ExpiryWatch(security).ends
    history = HistoryFile(journal.path.parent) if journal else None
    recorder = JobRecorder(driver, config.words, file=history)

    def on_made(made: CheckpointMade) -> None:
        recorder.saved(str(made.folder), made.size_bytes, made.seconds, frozenset(map(str, made.there)), made.step)

    limit_counts = LimitCounts()
    checkpoints = Checkpoints(driver, config.checkpoints, on_made, recorder.kept)
    moves = MoveRunner(driver, checkpoints.busy)
    kept = config.engine if isinstance(config.engine, KeptRequest) else None
    scaling = JobScaling(driver, moves, config.engine, time.monotonic)
    publishing = PublishRunner(driver, checkpoints.busy)
    service = CoordinatorService(
        driver, checkpoints, moves, recorder, access.sessions, limit_counts, kept, scaling, publishing
    )
    metrics: MetricsServer | None = None
    page: PageServer | None = None
    server = await grpc_server.start(
        config.bind,
        config.port,
        [(SERVICE_NAME, service.register)],
        MAX_REQUEST_BYTES,
        access.authorization,
        limits=config.limits,
        limit_counts=limit_counts,
    )
    try:
        driver.start()
        view = driver.status().view
        workers = config.words["workers"].replace("any number", "any number of")
        logger.info(
            "server.started",
            "coordinator serves at %s: %d shards, %s workers, %s",
            server.address,
            len(view.used_shards),
            workers,
            view.consistency,
        )
        metrics = _serve_metrics(config.metrics, driver, checkpoints, moves, publishing, limit_counts, security)
        driver.metrics_url = metrics.url if metrics else ""
        page = serve_page(config.bind, config.page_port, recorder, security)
        if config.ready_file is not None:
            grpc_server.write_ready_file(config.ready_file, server.address)
        recording = asyncio.create_task(recorder.run(), name="history")
        elasticity = ElasticityRunner(driver, moves, config.elastic, config.engine, time.monotonic)
        adapting = asyncio.create_task(elasticity.run(), name="elasticity")
        scaling_task = asyncio.create_task(scaling.run(), name="scaling")
        running = asyncio.create_task(checkpoints.run(), name="checkpoints")
        ending = end_with_job(driver, checkpoints, stop if config.exit_when_finished else None)
        watching = asyncio.create_task(ending, name="end-with-job")
        await first_of(stop.wait(), driver.failed.wait())
        for each in (watching, recording, adapting, scaling_task):
            each.cancel()
        await moves.stop()
        await publishing.stop()
        if driver.failed.is_set():
            # A checkpoint would contain the data leases and phases of an older journal.
            running.cancel()
            driver.check_failed()
        checkpoints.stop()
        await running
        if checkpoints.unsaved is not None and unsaved is not None:
            unsaved.append(checkpoints.unsaved)
        await recorder.save()
    finally:
        if page:
            await asyncio.to_thread(page.close)
        # Watch streams end first; the server then has no call to wait for.
        await driver.close()
        await server.stop()
        if metrics:
            await asyncio.to_thread(metrics.close)


def _serve_metrics(
    config: MetricsConfig,
    driver: Driver,
    checkpoints: Checkpoints,
    moves: MoveRunner,
    publishing: PublishRunner,
    limits: LimitCounts,
    security: Security,
) -> MetricsServer | None:
    """Serve the coordinator's metrics, and the addresses of all members' beside them. Raises ConfigError."""
    loop = asyncio.get_running_loop()
    metrics = CoordinatorMetrics(driver, checkpoints, moves, limits, publishing)
    return serve_metrics(
        config,
        COORDINATOR.role,
        call_on_loop(loop, metrics.read),
        {JOB_LABEL: driver.settings.job},
        call_on_loop(loop, lambda: targets(driver.status())),
        security,
    )


def serve_page(bind: str, port: int | None, recorder: JobRecorder, security: Security) -> PageServer | None:
    """Serve the page of this job, unless ``port`` is None. Called on the coordinator's loop.

    Raises ConfigError when its libraries are not installed, or it cannot listen there.
    """
    if port is None:
        return None
    check_libraries("the page (--page-port)")
    # The page's libraries are an optional extra, and slow to import.
    from ps_server.page.server import PageServer

    loop = asyncio.get_running_loop()

    async def history() -> JobHistory:
        return recorder.history()

    async def source() -> JobHistory:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(history(), loop))

    page = PageServer(bind, port, source, security)
    recorder.configuration["page"] = page.url
    logger.info("server.started", "page at %s", page.url)
    return page


@click.command(
    help=_HELP,
    context_settings={"auto_envvar_prefix": "PS_COORDINATOR", "show_default": True, "max_content_width": 100},
)
@common.server_options(DEFAULT_PORT, "PS_COORDINATOR")
@common.page_port_option
@metrics_option("PS_COORDINATOR_METRICS_PORT", "PS_METRICS_PORT")
@server_security_options
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="no journal",
    help="Folder of the journal of this job, created if missing. A coordinator that is restarted with the same folder "
    "continues the job.",
)
@click.option(
    "--accept-older-journal",
    is_flag=True,
    help="Continue although the journal in --data-dir lacks its last commits, because it is an older copy or its end "
    "is damaged. Their contents are lost: members that joined, models that were declared, moves, changes of the mode.",
)
@click.option(
    "--shards",
    type=click.IntRange(1, MOST_SHARDS),
    default=1,
    help="Number of shards at the start of the job. ps-server --add adds more.",
)
@click.option(
    "--workers",
    type=common.WORKERS,
    default=0,
    help="Number of workers. The job starts when all of them have joined. MIN:MAX: it starts with MIN, and workers "
    "join and leave at any time, MAX at most. 0: any number of them.",
)
@click.option(
    "--mode",
    type=MODES,
    default=Mode.ASYNC.value,
    help="async: apply each gradient on arrival. ssp: async, with a bound on how far workers drift apart. sync: apply "
    "the mean of all workers' gradients of a step.",
)
@options(ModeOptions, PartitionOptions, ClusterSettings, ElasticSettings)
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), show_default="random", help="Seed of the job.")
@common.exit_option
@options(EngineOptions, CheckpointConfig, ServerLimits, JobLimits)
@click.pass_context
def main(context: click.Context, /, **values: Any) -> None:
    """Entry point of ps-coordinator."""
    configure_logging(values["log_level"], LogFormat(values["log_format"]))
    describe_process(role="coordinator", job=values["security"].job)
    unsaved: list[PsError] = []
    with common.clean_errors():
        given = {name for name in values if was_given(context, name)}
        common.check_descriptors(common.OWN_DESCRIPTORS, "this coordinator")
        common.check_ready_file(values["ready_file"])
        life = take_life_pipe(os.environ)
        from_engine = from_tf_config(os.environ.get("TF_CONFIG", ""), given)
        folder: Path | None = values["data_dir"]
        older = values["accept_older_journal"]
        with nullcontext() if folder is None else Journal.open(folder, accept_older=older) as journal:
            kept = from_rows(journal.read(), str(journal.path)) if journal else None
            config = configure({**values, **from_engine}, given | from_engine.keys(), kept)
            if config.checkpoints.directory is not None:
                check_writable(config.checkpoints.directory)
            grpc_server.run(lambda stop: showing_life(serve(config, journal, stop, unsaved), life))
    for error in unsaved:
        error.message = f"the last checkpoint was not written: {error.message}"
        common.fail(error, EXIT_UNSAVED)


def program() -> NoReturn:
    """The process of ps-coordinator."""
    common.run_program(main)


if __name__ == "__main__":
    program()
