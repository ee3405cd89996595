"""A stream of clicks, trained and ranked window by window: here, with kills, in one process, and in TensorFlow."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# Their packages are found as a script beside them finds them.
sys.path.append(str(EXAMPLES))
