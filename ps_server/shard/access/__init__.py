"""What a caller may do: who may call which method, whether a worker fits, and how much memory answers take."""
