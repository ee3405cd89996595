"""The whole shard paused at one point of the job: Quiescence owns the cut, each model its gate."""
