"""``python -m benchmarks.crowd``: measure, print tables, write them as JSON."""

import os

if __name__ == "__main__":
    # torch reads the level when it is loaded; peers warn of workers that end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from benchmarks.crowd.program import main

    main()
