"""What members are told: the publisher owns the views on their way, how often they come and what is in each."""
