"""The guided first run, and the sample of parallel text that it trains on."""
