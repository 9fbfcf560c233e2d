"""From text to a run: checks, vocabulary and ids, reading order, the initial model."""
