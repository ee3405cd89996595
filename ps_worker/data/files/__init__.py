"""Rows of Parquet and text files: found, laid out in parts that are leased, read and decoded beside the training loop.

``sources`` looks at each file once. ``layout`` decides, purely, which rows are a part, and their order in an epoch.
``formats`` reads the rows of a part, ``columns`` turns them into tensors, ``reader`` does both in a thread of its own.
``batches`` is what the training loop iterates.
"""
