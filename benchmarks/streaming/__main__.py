"""``python -m benchmarks.streaming``: measure, print tables, keep the results."""

if __name__ == "__main__":
    from benchmarks.streaming.program import main

    main()
