"""How good the model is, and how well the machine is used."""
