"""``python -m benchmarks``: measure, print a table, write it as JSON and as a plot."""

import os

if __name__ == "__main__":
    # Children import this module too, and need neither the program nor its imports. torch reads the level when loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from benchmarks.program import main

    main()
