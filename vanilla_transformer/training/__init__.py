"""Training: options, loss, learning rate, checkpoints, averaging and the loop itself."""
