"""psctl top: the command owns the terminal and its keys, and draws what `glance_view` makes of a glance at the job."""
