"""Files of texts, and the layouts of their lines."""
