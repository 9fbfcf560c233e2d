"""One optimiser step: loss, schedule, gradients over processes, and what can go wrong in it."""
