"""What more training data brings: a curve over runs of different sizes, and its doubling."""
