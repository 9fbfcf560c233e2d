"""The layers as CPUs compute them fast: fused operations, packed batches, memory."""
