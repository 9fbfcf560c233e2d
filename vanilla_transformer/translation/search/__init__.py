"""The search for a translation."""
