"""The real decisions keep their promises through faults, whatever the seed."""

import os
import random
import re
import secrets
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from ps_protocol.model.spec import Consistency, Mode
from simulation.__main__ import main
from simulation.folders import new_folder, remove_left_behind
from simulation.plan import ALL_FAULTS, Fault, Size
from simulation.planning import make_plan
from simulation.runtime.disk import Files
from simulation.runtime.kernel import Kernel
from simulation.runtime.network import Network
from simulation.runtime.substitutes import installed
from tests.simulation.runs import run
from tests.support.length import choose


@pytest.mark.parametrize("seed", range(choose(16, 2)))
def test_a_seed_breaks_no_promise(seed):
    assert run(seed).violation == "", f"replay with: python -m simulation --seed {seed} --trace"


def without_readers(plan):
    """As the seed was before there were any."""
    return replace(without_relay(plan), readers=0, faults=without_relay(plan, "reader").faults)


def without_relay(plan, *others):
    """As the seed was before there was one."""
    faults = tuple(fault for fault in plan.faults if fault.kind not in ("relay", *others))
    return replace(plan, relayed=0, faults=faults)


def test_the_code_of_an_ended_process_closes_nothing_that_others_have_opened_since():
    """In this seed a shard is killed while it opens its folder, and its lock's number becomes another one's memory."""
    assert run(605138).violation == ""


def test_a_worker_that_dies_before_its_leader_welcomes_it_leaves_no_connection_that_is_heard_again_and_again():
    assert run(620058, change=without_readers).violation == ""


def test_a_host_whose_leader_sends_its_push_again_after_a_move_waits_for_nobody_that_waits_for_that():
    assert run(621028).violation == ""


def test_a_host_that_cannot_push_as_one_after_its_stream_broke_gets_no_values_that_could_be_wrong():
    assert run(622405).violation == ""


def test_a_worker_that_waits_in_a_model_that_it_steps_by_itself_is_waited_for_no_longer_than_a_lease():
    assert run(624501).violation == ""


def test_a_shard_that_forgot_where_a_worker_entered_hears_it_again_though_that_waits_for_its_host():
    assert run(625971).violation == ""


def test_a_shard_that_does_not_take_the_push_of_a_host_gets_that_of_its_leader_while_others_are_waited_for():
    """Two hosts and two shards: each shard took the push of one host, and waited for a worker of the other."""
    assert run(627962, change=without_relay).violation == ""


def test_a_worker_that_waits_for_rows_waits_for_nobody_who_waits_for_its_push():
    """A shard comes back without the last push, and a follower has opened its stream there before it hears of that."""
    drawn = random.Random("snapshot851")
    kinds = ("shard_crash", "snapshot_crash", "coordinator_crash", "partition", "reader", "disk_full")
    many = [Fault(drawn.uniform(1.0, 14.0), drawn.choice(kinds)) for _ in range(drawn.randrange(6, 16))]
    _ = drawn.randrange(1, 4), drawn.random(), drawn.random()
    changes = {
        "readers": 0,
        "faults": tuple(sorted(many, key=lambda fault: fault.time)),
        "quiet_at": 14.0,
        "ends_at": 314.0,
        "think_seconds": drawn.uniform(0.2, 1.5),
        "durable": False,
        "snapshot_seconds": 0.7,
        "standby": False,
    }
    assert run(851, change=lambda plan: replace(plan, **changes)).violation == ""


def test_shards_that_slices_have_moved_to_hear_where_a_worker_stands_that_waits_for_its_host():
    """They had forgotten a push that changed nothing, and its worker, which had pushed alone, waited for its leader."""
    assert run(652731).violation == ""


def test_a_shard_that_was_started_again_hears_where_a_worker_stands_in_a_later_phase_than_it_has_passed_barriers():
    """The job began with a checkpoint that was made in a barrier: its shards were in the phase behind it."""
    assert run(652477).violation == ""


def test_only_shards_that_could_not_take_a_host_as_one_get_the_push_of_its_leader():
    assert run(621389, change=without_readers).violation == ""


def test_shards_of_which_one_applied_pushes_without_their_round_come_to_one_point_again():
    """One is killed while the mode leaves sync, and its workers repeat in async what the others applied as a round."""
    assert run(625348, change=without_relay).violation == ""


@pytest.mark.parametrize("seed", [621266, 621196])
def test_the_answer_to_a_host_waits_for_none_of_its_own_workers(seed):
    """In ssp, of one that was steps behind; where async ended meanwhile, of one that waited with its next push."""
    assert run(seed).violation == ""


@pytest.mark.parametrize(
    "fixed",
    [
        {"wire": "int8"},
        {"wire": "topk:0.3", "overlap": True},
        {"standby": True, "durable": True, "acknowledged_after": False},
    ],
    ids=str,
)
def test_formats_and_standbys_break_no_promise(fixed):
    size = replace(choose(Size(), Size(shards=2, workers=3, steps=4)), swarms=0.0)
    assert run(2, size, change=lambda plan: replace(plan, **fixed)).violation == ""


def test_every_kind_of_fault_comes_and_breaks_no_promise():
    faults = tuple(Fault(2.0 + 0.7 * number, kind) for number, kind in enumerate(ALL_FAULTS))
    outcome = run(0, change=lambda plan: replace(plan, faults=faults, quiet_at=15.0, durable=True))
    assert outcome.violation == ""
    assert outcome.faults.keys() == set(ALL_FAULTS)


def test_eight_shards_and_many_workers_break_no_promise():
    outcome = run(1, Size(shards=8, workers=choose(20, 6), steps=1))
    assert outcome.violation == ""
    assert outcome.pushes or outcome.replies


MOVING = {"durable": True, "momentum": 0.0, "wire": "raw", "models": 1, "table": False}
"""What plans with moves have."""

OF_THEIR_OWN = ("new_job", "full_restart", "host", "reader", "relay")
"""Kinds of faults that come beside those of a swarm."""


def test_a_swarm_has_many_faults_of_few_kinds_and_the_share_of_swarms_is_asked_for():
    swarms = [make_plan(seed, Size(swarms=1.0)) for seed in range(50)]
    # With a relay there may be a checkpoint more, for another job.
    alone = [plan for plan in swarms if not plan.relayed]
    kinds = [[fault.kind for fault in plan.faults if fault.kind not in OF_THEIR_OWN] for plan in alone]
    assert all(8 <= len(each) <= 20 and len(set(each)) <= 5 for each in kinds)
    assert any("new_job" in {fault.kind for fault in plan.faults} for plan in swarms)
    assert all(fault.time < plan.quiet_at for plan in swarms for fault in plan.faults)
    half = [make_plan(seed, Size(swarms=0.5)) for seed in range(50)]
    assert 10 < sum(plan == swarm for plan, swarm in zip(half, swarms, strict=True)) < 40


def test_without_faults_all_work_is_done_and_applied():
    outcome = run(3, Size(faults=()), change=lambda plan: replace(plan, per_host=1))
    assert outcome.violation == ""
    assert outcome.replies >= 4 * 6 * 6


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC], ids=str)
def test_the_workers_of_a_host_push_as_one_and_all_of_it_is_applied(mode):
    fixed = {"per_host": 3, "consistency": Consistency(mode), "skipped": 0.0, "data_items": 0, "phases": 1, "models": 1}
    fixed |= {"table": False, "releases": False, "steps": 6}
    outcome = run(3, Size(faults=()), change=lambda plan: replace(plan, **fixed))
    assert outcome.violation == ""
    assert 4 * 6 * 2 <= outcome.pushes <= 4 * 6 * 6 // 2, "two hosts, and now and then a worker by itself"


@pytest.mark.parametrize("seed", choose(range(20), range(2)))
def test_workers_that_end_in_the_middle_of_a_sum_break_no_promise(seed):
    faults = tuple(Fault(1.5 + 0.6 * number, "host") for number in range(14))
    fixed = {"per_host": 2 + seed % 3, "faults": faults, "quiet_at": 12.0, "table": False}
    assert run(seed, change=lambda plan: replace(plan, **fixed)).violation == ""


@pytest.mark.parametrize("seed", choose(range(20), range(2)))
def test_readers_of_published_weights_break_no_promise_whatever_is_killed(seed):
    kinds = ("reader", "shard_crash", "snapshot_crash", "coordinator_crash", "disk_full", "move", "reader", "mode")
    faults = tuple(Fault(1.5 + 0.6 * number, kinds[(number + seed) % len(kinds)]) for number in range(14))
    fixed = {"readers": 2, "converts": True, "faults": faults, "quiet_at": 12.0, "think_seconds": 0.5, **MOVING}
    assert run(seed, change=lambda plan: replace(plan, **fixed)).violation == ""


@pytest.mark.parametrize("seed", choose(range(20), range(2)))
def test_readers_behind_a_relay_break_no_promise_whatever_is_killed_and_also_when_another_job_begins(seed):
    kinds = ("relay", "checkpoint", "relay", "shard_crash", "coordinator_crash", "reader", "relay", "partition")
    faults = [Fault(1.5 + 0.6 * number, kinds[(number + seed) % len(kinds)]) for number in range(14)]
    faults = tuple(sorted([*faults, Fault(7.0, "new_job")], key=lambda fault: fault.time))
    fixed = {"readers": 2, "relayed": 2, "converts": True, "faults": faults, "quiet_at": 12.0, "think_seconds": 0.5}
    fixed |= {"durable": True, "acknowledged_after": True, "models": 1, "releases": False}
    assert run(seed, change=lambda plan: replace(plan, **fixed)).violation == ""


def test_a_seed_gives_the_same_history_in_every_process(capfd):
    """Seed 6 has readers behind a relay."""
    few = choose([], ["--shards", "2", "--workers", "4", "--steps", "3"])
    replays = [["--seed", seed, "--trace", *few] for seed in ("7", "6")]
    program = f"""if True:
        import runpy, sys
        for replay in {replays}:
            sys.argv[1:] = replay
            try:
                runpy.run_module("simulation", run_name="__main__")
            except SystemExit as end:
                assert end.code == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    )
    for replay in replays:
        assert main(replay) == 0
    here, there = (re.sub(r"torch-ps-simulation-\w+", "folder", text) for text in (capfd.readouterr().out, done.stdout))
    assert here == there
    assert len(here.splitlines()) > 100


def test_a_module_that_comes_in_the_middle_of_a_run_is_an_error(monkeypatch):
    """It would use the time and the chance of the machine, and the history depend on what its process did before."""
    late = ModuleType("ps_server.late")
    late.secrets = secrets
    kernel = Kernel(1)
    network = Network(kernel, delay_seconds=0.0, calls_lost=0.0, calls_late=0.0)
    with pytest.raises(AssertionError, match=r"middle of a simulated run: ps_server\.late; name it"):  # noqa: SIM117
        with installed(kernel, network, Files()):
            monkeypatch.setitem(sys.modules, "ps_server.late", late)


def test_a_run_of_many_seeds_counts_them_and_says_where_the_next_begins(capsys):
    small = ["-j", "1", "--shards", "1", "--workers", "2", "--steps", "1", "--faults", "none"]
    assert main(["--seeds", "2", "--from", "5", *small]) == 0
    told = capsys.readouterr().out
    assert "2 seeds from 5 (1 shards, 2 workers): 0 violations" in told
    assert told.endswith("to go on: --from 7\n")


def test_folders_of_runs_that_were_killed_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr("simulation.folders._MEMORY", tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"torch-ps-simulation-{ended.pid}_x", f"torch-ps-simulation-{os.getpid()}_x", "another", f"{ended.pid}_x"]
    for name in names:
        (tmp_path / name / "inside").mkdir(parents=True)
    remove_left_behind()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names[1:])
    with new_folder() as folder:
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_what_closes_memory_after_a_run_does_not_keep_its_processes(monkeypatch):
    files = Files()
    monkeypatch.setattr("simulation.world.Files", lambda: files)
    assert not run(3, Size(shards=1, workers=2, steps=2)).violation  # its shard dies in the middle of a write
    assert not files.disks
    assert not files.armed


def test_a_fault_that_is_unknown_is_refused(capsys):
    assert main(["--faults", "shard_crash,flood"]) == 2
    assert "unknown faults: flood" in capsys.readouterr().out
