"""The episode loop: attempts at tasks, verified, in order, resumable."""
