"""What a model does, as arrays, figures and self-contained pages: attention, positions, schedules, runs, tokens."""
