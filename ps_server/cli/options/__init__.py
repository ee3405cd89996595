"""Settings and options that several commands share."""
