"""Writes docs/metrics.md from the definitions: ``python -m tests.support.metrics_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ps_protocol.metrics.common import COMMON
from ps_protocol.metrics.definition import Catalogue, Metric
from ps_server.coordinator.metrics import COORDINATOR
from ps_server.relay.metrics import RELAY
from ps_server.serving.metrics import SERVER
from ps_server.shard.metrics import SHARD
from ps_worker.session.metrics import WORKER

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

CATALOGUES = (COMMON, SERVER, COORDINATOR, SHARD, WORKER, RELAY)

_INTRODUCTION = """\
# Metrics

Every process of a job serves its numbers for [Prometheus](https://prometheus.io) at `/metrics`, on a port of its own.

| process | where | default |
|---|---|---|
| `ps-coordinator`, `ps-server` | `--metrics-port` (`0`: any free one; `off`), on the address of `--bind` | `0` |
| workers, evaluators | `PS_METRICS_PORT`, on the address of `PS_METRICS_BIND` (127.0.0.1) | `off` |
| `psctl weights relay` | `--metrics-port`, on the address of `--bind` | `0` |
| `ps-run` | `--metrics-port` for the coordinator; every other process takes any free port | `0` |

A process logs the address when it starts, and `ps-run` prints that of the coordinator. The coordinator lists the
addresses of all live members at `/targets`, in the format of Prometheus' HTTP service discovery, so that Prometheus
needs to know the coordinator alone; relays of weights are no members, and it is told of each by itself:

```yaml
scrape_configs:
  - job_name: torch-ps
    honor_labels: true
    http_sd_configs:
      - url: http://coordinator:9400/targets
        refresh_interval: 15s
```

Each target has the label `component`: `coordinator`, `shard`, `standby`, `worker` or `evaluator`; and `ps_job`, the
name of the job, which every metric has, too ([monitoring.md](monitoring.md#several-jobs-under-one-prometheus)).
[deploy/monitoring](../deploy/monitoring) has a `prometheus.yml`, alert rules and a Grafana dashboard.

With TLS the pages are served over HTTPS with the certificate of the process, which has to name its host. Those that
`ps-run --tls` makes for workers name none, so Prometheus reads coordinator and shards alone there. With tokens a caller
needs any role but `worker`, best `viewer`, as `Authorization: Bearer SECRET`. Without either they are plain, for
loopback or a trusted network. On loopback they are then answered to IP addresses and names of this host alone, as a web
page of another site could read them by a name of its own: the header `Host` of other requests gets status 421. A
request has 10 s; 16 are served at a time, and a connection that has sent no whole request gives way to another.

A process that is stuck answers with status 503, or not at all; `up` is 0 then. Durations are in seconds and sizes in
bytes. Counters begin at 0 with the process, except those of pushes and staleness, which a shard keeps with its state.
Names of models and tables come from the script; Prometheus' client escapes them.

This page is written by `make metrics-page` from the definitions in the code.
"""

_TITLES = {
    "process": ("Every process", ""),
    "server": ("Coordinator, shards and relays", ""),
    "coordinator": ("Coordinator", ""),
    "shard": ("Shards", "Each has the label `shard` as well. A standby has the number of the shard that it follows."),
    "relay": ("Relays of published weights", ""),
    "worker": ("Workers and evaluators", "Each has the label `worker` as well: the rank."),
}


def page() -> str:
    """The text of docs/metrics.md."""
    return "\n".join([_INTRODUCTION, *(line for each in CATALOGUES for line in _section(each))])


def _section(catalogue: Catalogue) -> Iterator[str]:
    title, text = _TITLES[catalogue.role]
    yield f"## {title}\n"
    if text:
        yield f"{text}\n"
    yield "| metric | type | labels | |"
    yield "|---|---|---|---|"
    yield from map(_row, catalogue.own)
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"


if __name__ == "__main__":
    PAGE.write_text(page())
