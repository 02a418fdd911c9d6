"""The user's own serving engine: started for a measurement, or asked while it runs."""
