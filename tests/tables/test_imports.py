"""Who has no tables does not wait for the compiler; the SDK: ``tests/worker/session/test_public_face.py``."""

from __future__ import annotations

import json
import subprocess
import sys

MODULES = ["ps_server.cli.launcher.main", "ps_server.coordinator.main", "ps_server.shard.main"]

#: The arguments are modules; says which of them, imported in this order, have numba loaded.
IMPORTS = """
import importlib, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.import_module(name) and "numba" in sys.modules]))
"""


def test_compiled_code_is_imported_at_its_first_use_only():
    said = subprocess.check_output([sys.executable, "-c", IMPORTS, *MODULES], text=True, timeout=60)
    assert json.loads(said) == []
