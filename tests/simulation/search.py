"""``python -m tests.simulation.search [NAME]``: finds for each mutation, or those whose test has NAME in it, a seed.

Of the first seeds that show it, the one with the fewest events is written to ``known_seeds.json``, with which the test
begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.runs import SEARCH

FILES = Path(__file__).parent.glob("test_mutations*.py")


def main(arguments: list[str]) -> int:
    chosen = ["-k", arguments[0]] if arguments else []
    tests = [sys.executable, "-m", "pytest", "-q", *chosen, *sorted(map(str, FILES))]
    return subprocess.run(tests, env={SEARCH: "3"} | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
