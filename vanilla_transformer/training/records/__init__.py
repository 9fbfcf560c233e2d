"""What a run keeps on the disk: checkpoints, their averages, the journal."""
