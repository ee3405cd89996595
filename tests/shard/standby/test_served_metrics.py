"""The page of metrics of a shard and its standby, from when it is found to the takeover. In this process: 2 s."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from ps_protocol.cluster.view import Role
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.coordinator.metrics import targets
from ps_server.serving.metrics import MetricsConfig
from tests.support.shards import wait_until
from tests.worker.jobs import running_job


def page(address: str) -> dict[tuple[str, str], float]:
    """By name without prefix, and the number of the shard."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as got:
        text = got.read().decode()
    return {
        (sample.name.removeprefix("torch_ps_"), sample.labels["shard"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_standby_is_found_by_prometheus_and_serves_once_it_has_the_place(tmp_path):
    with running_job(start_shards=0) as job:
        for name in ("first", "second"):
            config = StorageConfig(Durability.DURABLE, tmp_path / name)
            job.start_shard(0, name, storage=config, standby=True, metrics=MetricsConfig(port=0))
            job.wait_for_shards()

        def found() -> dict[str, str]:
            return {target.component: target.address for target in targets(job.client.get_status())}

        wait_until(lambda: found().keys() == {Role.SHARD.value, Role.STANDBY.value})
        shard, standby = found()["shard"], found()["standby"]
        assert (page(shard)["shard_serving", "0"], page(standby)["shard_serving", "0"]) == (1, 0)
        wait_until(lambda: page(shard)["standby_connected", "0"] == 1)
        job.stop_shard(0)
        wait_until(lambda: page(standby)["shard_serving", "0"] == 1)
        wait_until(lambda: found() == {"shard": standby})
