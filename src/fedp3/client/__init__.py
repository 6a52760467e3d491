"""The client's side of a round (Algorithm 2)."""
