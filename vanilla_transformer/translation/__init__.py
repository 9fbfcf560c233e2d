"""Translation: text in, text out."""
