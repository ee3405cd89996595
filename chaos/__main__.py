"""``python -m chaos``: see ``chaos.program``."""

from chaos.program import main

if __name__ == "__main__":
    main()
