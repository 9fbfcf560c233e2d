"""From a run's records to a repository on the Hub: facts, card, files, one commit."""
