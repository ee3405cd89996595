"""The page in a real browser: what it loads, shows, and says when the coordinator is away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.cluster.view import Role
from ps_protocol.cluster.weights import WeightsReader
from ps_protocol.model.spec import Consistency, Mode
from ps_server.page.report import report_html
from tests.glance.jobs import history, publication, shard, worker
from tests.page.chromium import Browser, Tab, needs_chromium, running_browser
from tests.page.jobs import running_page
from tests.support.certificates import made_folder, security_of

pytestmark = needs_chromium

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture
def tab(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Tab:
    # A member whose connection has ended is lost so soon.
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 0.5)
    return browser.tab()


def test_the_page_loads_from_its_own_server_alone_and_without_an_error(tab: Tab) -> None:
    with running_page() as job:
        job.join(Role.WORKER, 0)
        tab.open(job.url)
        tab.wait_for_text("#workers tbody", "worker 0")
        tab.wait_for_text("#connection", "live")
        assert tab.problems == []
        assert {request for request in tab.requests if not request.startswith(job.url)} == set()


def test_changes_show_while_it_is_open(tab: Tab) -> None:
    with running_page(expected_workers=2) as job:
        tab.open(job.url)
        tab.wait_for_text("#tiles", "waiting for members")
        workers = [job.join(Role.WORKER, rank) for rank in range(2)]
        job.join(Role.SHARD, 0)
        tab.wait_for_text("#tiles", "training")
        for step in range(3):
            for joined in workers:
                job.beat(joined, steps=step, metrics={"loss": 2.0 - step / 2})
        tab.wait_for_text("#tiles", "loss")
        tab.wait("document.querySelector('#curves svg polyline') !== null")
        tab.wait_for_text("#events", "worker 1 joined")
        job.set_mode(Consistency(Mode.SYNC))
        tab.wait_for_text("#tiles", "sync")
        tab.wait_for_text("#events", "consistency changed from async to sync")


def test_the_page_and_its_tab_have_the_name_of_the_job_and_say_when_it_is_stalled(tab: Tab) -> None:
    with running_page(job="ads-nightly") as job:
        job.join(Role.WORKER, 0)
        shard_0 = job.join(Role.SHARD, 0)
        tab.open(job.url)
        tab.wait("document.title === 'training · ads-nightly'")
        assert tab.text("h1") == "ads-nightly"
        job.connect_and_vanish(shard_0)
        tab.wait_for_text("#tiles .bad", "stalled: shard 0 lost for ")
        assert tab.run("document.title").startswith("(1) stalled: shard 0 lost for ")
        assert tab.problems == []


def test_it_survives_a_restart_of_the_coordinator(tab: Tab) -> None:
    with running_page() as job:
        job.join(Role.WORKER, 0)
        tab.open(job.url)
        tab.wait_for_text("#workers tbody", "worker 0")
        job.stop()
        tab.wait_for_text("#connection", "the coordinator does not answer")
        job.start()
        tab.wait_for_text("#connection", "live")
        job.join(Role.WORKER, 7)
        tab.wait_for_text("#workers tbody", "worker 7")
        assert "worker 0" not in tab.text("#workers tbody")
        assert tab.run("document.querySelectorAll('#events li').length") < 5


def test_a_killed_shard_shows(tab: Tab) -> None:
    with running_page() as job:
        shard = job.join(Role.SHARD, 0)
        job.join(Role.WORKER, 0)
        tab.open(job.url)
        tab.wait_for_text("#shards tbody", "live")
        job.connect_and_vanish(shard)
        tab.wait_for_text("#shards tbody", "lost")
        tab.wait_for_text("#alerts", "shard 0 is lost")
        tab.wait_for_text("#events", "lease ended: shard 0")


def test_under_tls_with_client_certificates_a_browser_logs_in_with_a_token(tab: Tab, tmp_path: Path) -> None:
    """As ps-run --tls --page has it: servers require certificates of clients, and a browser has none."""
    folder = made_folder(tmp_path / "tls", 1)
    security = security_of(folder, "coordinator")
    assert security.settings.require_client
    with running_page(security) as job:
        assert job.url.startswith("https://")
        job.join(Role.WORKER, 0)
        tab.call("Security.setIgnoreCertificateErrors", ignore=True)
        tab.open(job.url)
        tab.wait("document.querySelector('#token') !== null")
        tab.run(f"document.querySelector('#token').value = {(folder.path / 'viewer.token').read_text()!r}")
        tab.problems.clear()  # the form came with status 401
        # When the answer to this is on its way: the page is left.
        tab.run("setTimeout(() => document.querySelector('form').requestSubmit()) > 0")
        tab.wait_for_text("#workers tbody", "worker 0")
        tab.wait_for_text("#connection", "live")
        assert tab.problems == []
        assert tab.run("document.cookie") == ""


def test_names_from_outside_stay_text(tab: Tab) -> None:
    with running_page() as job:
        job.beat(job.join(Role.WORKER, 0), metrics={EVIL: 1.0}, transport=EVIL)
        tab.open(job.url)
        tab.wait_for_text("#tiles", EVIL)
        tab.wait_for_text("#workers tbody", EVIL)
        assert tab.run("document.querySelectorAll('#tiles img, #tiles script, #workers img').length") == 0
        assert tab.run("document.title") != "taken"
        assert tab.problems == []


def test_a_report_opens_alone(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "job.html"
    file.write_text(report_html(history(worker(0, metrics={EVIL: 1.0}), shard(0)), EVIL))
    tab.open(file.as_uri())
    tab.wait_for_text("#workers tbody", "worker 0")
    tab.wait_for_text("#connection", "report of")
    tab.wait_for_text("h1", EVIL)
    assert [request for request in tab.requests if request != file.as_uri()] == []
    assert tab.problems == []
    assert tab.run("document.title") != "taken"


def test_published_weights_show_with_the_readers_furthest_behind_and_the_number_of_the_others(
    tab: Tab, tmp_path: Path
) -> None:
    readers = [WeightsReader(str(at), EVIL, at, 7 - at % 3, 5_000_000, 10_000, 0.0, 15_000_000) for at in range(60)]
    policy = publication(
        "policy",
        *readers,
        reader_count=10_000,
        relayed_readers=50,
        delta_bytes=5_000_000_000,
        saved_bytes=15_000_000_000,
    )
    job = replace(history(worker(0), shard(0)), publications=(replace(policy, model=EVIL), publication("value")))
    file = tmp_path / "job.html"
    file.write_text(report_html(job, "job"))
    assert file.stat().st_size < 200_000
    tab.open(file.as_uri())
    tab.wait_for_text("#publications tbody", "policy")
    heads = tab.run("[...document.querySelectorAll('#publications thead th')].map((cell) => cell.textContent)")
    cells = tab.run("[...document.querySelector('#publications tbody tr').cells].map((cell) => cell.textContent)")
    row = dict(zip(heads, cells, strict=True))
    assert (row["version"], row["step"], row["age"], row["readers"], row["behind"]) == (
        "7",
        "70",
        "1 min",
        "10.0 k",
        "2",
    )
    assert (row["as deltas"], row["saved"], row["by relays"]) == ("5.0 GB", "15.0 GB", "50")
    assert "serves" not in tab.text("#readers thead")
    assert tab.run("document.querySelectorAll('#readers tbody tr').length") == 50
    assert tab.text("#more-readers") == "and 9950 more readers"
    assert EVIL[:64] in tab.text("#readers tbody")
    assert tab.run("document.querySelectorAll('#publications img, #readers img, #readers script').length") == 0
    assert tab.problems == []


def test_versions_and_readers_that_come_and_go_show_while_it_is_open(tab: Tab) -> None:
    with running_page() as job:
        job.join(Role.WORKER, 0)
        tab.open(job.url)
        tab.wait_for_text("#workers tbody", "worker 0")
        job.publish("policy", 1)
        tab.wait_for_text("#publications tbody", "policy")
        tab.wait("document.querySelector('#readers').closest('div').hidden")
        job.follow("policy", have=1, reader="a")
        job.publish("policy", 2)
        tab.wait_for_text("#readers tbody", "policy: host-a (7)")
        behind = "[...document.querySelectorAll('#readers tbody td')].some((cell) => cell.textContent === '1')"
        tab.wait(behind)
        job.follow("policy", have=2, reader="a")
        tab.wait(f"!({behind})")
        age = "[...document.querySelectorAll('#publications tbody td')].map((cell) => cell.textContent)"
        first = tab.run(age)
        tab.wait(f"({age}).join() !== {','.join(first)!r}")  # its age
        job.follow("policy", have=2, reader="a", leaves=True)
        tab.wait("document.querySelectorAll('#readers tbody tr').length === 0")
        assert tab.problems == []


def test_a_job_that_publishes_nothing_has_no_such_section(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "job.html"
    file.write_text(report_html(history(worker(0), shard(0)), "job"))
    tab.open(file.as_uri())
    tab.wait_for_text("#workers tbody", "worker 0")
    assert "Published weights" not in tab.text()


@pytest.mark.parametrize("width", [390, 1280])
def test_two_hundred_workers_fit_the_window_and_can_be_filtered_and_sorted(
    tab: Tab, tmp_path: Path, width: int
) -> None:
    workers = [worker(rank, steps_per_second=1.0 + rank, steps=rank) for rank in range(200)]
    file = tmp_path / "job.html"
    file.write_text(report_html(history(*workers, shard(0)), "job"))
    tab.view(width, 900)
    tab.open(file.as_uri())
    tab.wait("document.querySelectorAll('#workers tbody tr').length === 200")
    assert tab.run("document.documentElement.scrollWidth") <= width
    tab.run(
        "var box = document.querySelector('#filter'); box.value = 'worker 19'; box.dispatchEvent(new Event('input'))"
    )
    assert tab.run("document.querySelectorAll('#workers tbody tr:not([hidden])').length") == 11
    tab.run("box.value = ''; box.dispatchEvent(new Event('input'))")
    tab.run("var step = [...document.querySelectorAll('#workers thead button')].find((b) => b.textContent === 'step')")
    tab.run("step.click(); step.click()")
    assert tab.text("#workers tbody tr:first-child th") == "worker 199"
    assert tab.run("step.closest('th').getAttribute('aria-sort')") == "descending"


def test_the_page_can_be_read_without_looking(tab: Tab) -> None:
    with running_page() as job:
        job.join(Role.WORKER, 0)
        tab.open(job.url)
        tab.wait_for_text("#workers tbody", "worker 0")
        assert tab.run("document.documentElement.lang") == "en"
        assert tab.run("document.querySelectorAll('main, header').length") == 2
        assert tab.run("document.querySelector('#connection').getAttribute('aria-live')") == "polite"
        assert tab.run("document.querySelector('#alerts').getAttribute('role')") == "alert"
        assert tab.run("[...document.querySelectorAll('thead th')].every((cell) => cell.scope === 'col')")
        assert tab.run("[...document.querySelectorAll('tbody th')].every((cell) => cell.scope === 'row')")
        assert tab.run(
            "[...document.querySelectorAll('section')].every((part) => part.ariaLabel || "
            "document.getElementById(part.getAttribute('aria-labelledby')))"
        )
        assert tab.run("[...document.querySelectorAll('svg')].every((drawing) => drawing.getAttribute('aria-label'))")
