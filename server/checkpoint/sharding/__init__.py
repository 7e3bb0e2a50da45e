"""One shard of a checkpoint: who has what of each weight, and how it is read."""
