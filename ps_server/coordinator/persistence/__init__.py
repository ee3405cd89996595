"""The persisted state of the coordinator, the journal it is in, and the proof that the journal's end is not missing."""
