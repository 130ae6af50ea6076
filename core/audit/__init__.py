"""Question-blind audits of right/wrong answer pairs, and pruning of what lets a reader of the surface alone win."""
