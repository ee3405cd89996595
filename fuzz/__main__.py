"""``python -m fuzz``: see ``fuzz.program``."""

from fuzz.program import main

if __name__ == "__main__":
    main()
