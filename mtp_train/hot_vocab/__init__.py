"""Drafting from the tokens that answers use most: what it costs in acceptance, gains in speed."""
