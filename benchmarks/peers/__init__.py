"""What torch-ps is measured against, each brought up beside it on the same machine."""
