"""``save_state`` and ``load_state`` of Accelerate on two workers. Two whole jobs; costs 3 s of CPU time."""

from __future__ import annotations

from pathlib import Path

from tests.cli import forked
from tests.recovery.zygote import shared

SYNC = ("--no-progress", "--seed", "1", "--mode", "sync", "--shards", "2", "--workers", "2")

NAMED_BY_ITSELF = """
import torch
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset
from ps_worker.huggingface import PsAccelerator

named = ProjectConfiguration("out", automatic_checkpoint_naming=True, total_limit=2)
accelerator = PsAccelerator(project_config=named)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(numbers, numbers.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def epoch():
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
    scheduler.step()


for number in range(3):
    epoch()
    assert str(accelerator.save_state()).endswith(f"checkpoint_{number}")
drawn = torch.rand(1)
epoch()
first = [parameter.detach().clone() for parameter in model.parameters()], scheduler.get_last_lr()
accelerator.load_state()
assert torch.equal(torch.rand(1), drawn), "the random state is another"
epoch()
torch.testing.assert_close(list(model.parameters()), first[0], rtol=0, atol=0)
assert scheduler.get_last_lr() == first[1]
print("the same", drawn.item(), flush=True)
"""

REFUSED = """
import pathlib, torch
from ps_worker.huggingface import PsAccelerator

accelerator = PsAccelerator()
model = torch.nn.Linear(4, 1)
accelerator.prepare(model, torch.optim.SGD(model.parameters()))
if accelerator.is_main_process:
    pathlib.Path("file").write_text("")
    try:
        accelerator.save_state("file/folder")
    except OSError:
        print("refused", flush=True)
else:
    assert accelerator.save_state("file/folder") is None
    print("went on", flush=True)
"""


def test_checkpoints_are_named_counted_and_loaded_on_every_worker(tmp_path: Path) -> None:
    done = run(tmp_path, NAMED_BY_ITSELF)
    drawn = [line.split()[-1] for line in done.splitlines() if "the same" in line]
    assert len(set(drawn)) == 2, done
    folder = tmp_path / "out" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    files = {path.name for path in (folder / "checkpoint_2").iterdir()}
    shared_files = {"model.safetensors", "optimizer.bin", "scheduler.bin"}
    assert files == shared_files | {"random_states_0.pkl", "random_states_1.pkl"}


def test_workers_go_on_where_rank_0_cannot_write(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSED)
    assert done.count("refused") == done.count("went on") == 1, done


def run(folder: Path, script: str) -> str:
    shared().load("ps_worker.huggingface")
    (folder / "script.py").write_text(script)
    done = forked.run(folder, *SYNC, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
