"""The commands ps-run and psctl, and the options that several commands take."""
