"""Who is asked for workers: ``base`` has what one is, ``find`` finds what ``--engine`` names."""
