"""Where registered classes come from: modules that are named, and entry points of installed packages. Costs no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError
from ps_protocol.model import registered_optimizers as registry
from ps_protocol.model.registered_optimizers import (
    load_entry_points,
    load_modules,
    named_modules,
    reads_shapes,
    register,
    registered_names,
    registered_optimizer,
)

CODE = """
from ps_protocol.model.registered_optimizers import register

@register(elementwise={elementwise})
class Mine:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are imported from; what they register is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.setattr(registry, "_loaded", set())
    return tmp_path


def write(folder: Path, module: str, *, elementwise: bool = True) -> None:
    (folder / f"{module}.py").write_text(CODE.format(elementwise=elementwise))


def install(folder: Path, *points: str) -> None:
    """A package with these entry points, as an installer leaves it."""
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[torch_ps.optimizers]", *points]))


def test_a_module_that_is_named_registers_its_classes(folder: Path) -> None:
    write(folder, "one_of_mine", elementwise=False)
    load_modules(["one_of_mine"])
    found = registered_optimizer("one_of_mine.Mine")
    assert found is not None
    assert found.torch_class is sys.modules["one_of_mine"].Mine
    assert reads_shapes("one_of_mine.Mine")
    assert "one_of_mine.Mine" in registered_names()


def test_an_installed_package_is_found_by_its_entry_point_and_imported_once(folder: Path) -> None:
    write(folder, "two_of_mine")
    install(folder, "mine = two_of_mine")
    assert registered_optimizer("two_of_mine.Mine") is None
    load_entry_points()
    found = registered_optimizer("two_of_mine.Mine")
    (folder / "two_of_mine.py").write_text("raise ValueError")
    load_entry_points()
    assert registered_optimizer("two_of_mine.Mine") is found is not None
    assert not reads_shapes("two_of_mine.Mine")


def test_what_cannot_be_imported_is_named(folder: Path) -> None:
    (folder / "three_of_mine.py").write_text("raise ValueError('not today')")
    with pytest.raises(ConfigError, match=r"three_of_mine cannot be imported.*not today"):
        load_modules(["three_of_mine"])
    with pytest.raises(ConfigError, match="nowhere_at_all"):
        load_modules(["nowhere_at_all"])
    install(folder, "broken = three_of_mine")
    with pytest.raises(ConfigError, match="entry point 'broken'"):
        load_entry_points()


def test_modules_are_separated_by_commas() -> None:
    assert named_modules(" a.b, c ,,") == ["a.b", "c"]
    assert named_modules("") == []


def test_a_class_that_no_other_process_can_import_is_refused(folder: Path) -> None:
    class Local:
        pass

    with pytest.raises(ConfigError, match="cannot be registered"):
        register(elementwise=True)(Local)
    script = type("Script", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match=r"__main__\.Script"):
        register(elementwise=True)(script)
    with pytest.raises(ConfigError, match=r"torch\.optim"):
        register(elementwise=True)(type("SGD", (), {"__module__": "torch.optim"}))


def test_a_class_is_registered_in_one_way(folder: Path) -> None:
    mine = type("Mine", (), {"__module__": "four_of_mine"})
    assert register(elementwise=True)(mine) is mine
    register(elementwise=True)(mine)
    with pytest.raises(ConfigError, match="twice, differently"):
        register(elementwise=False)(mine)
