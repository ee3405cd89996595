"""Measurements of torch-ps on this machine: ``make bench``. No test depends on a figure of theirs."""
