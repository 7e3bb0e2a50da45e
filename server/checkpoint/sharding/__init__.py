"""One shard of a checkpoint: which part of each weight a rank has, and how the part is read."""
