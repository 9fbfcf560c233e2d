"""From parallel text to padded batches: corpora, encoding, batching, collation."""
