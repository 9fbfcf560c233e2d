"""How a model scores the next tokens of a search, step by step."""
