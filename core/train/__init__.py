"""Batches, losses, the update loop and checkpoints."""
