"""Damages files of data directories at random, and judges what their readers make of them.

``python -m tests.damage`` does so thousands of times; ``test_damage.py`` a few times in each run of the tests.
"""
