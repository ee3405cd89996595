"""``python -m chaos``: see ``chaos.program``."""

import sys

from chaos.disk import why_no_mounts


def run() -> None:
    """Import what takes seconds only where this program is not run again."""
    no_mounts = why_no_mounts(sys.argv[1:])
    from chaos.program import main

    main(no_mounts)


if __name__ == "__main__":
    run()
