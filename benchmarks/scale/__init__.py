"""What the coordinator costs per member, with thousands of members that only join, send heartbeats and watch."""
