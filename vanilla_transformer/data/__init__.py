"""From parallel text to batches: corpora, encoding, batching, collation."""
