"""`mtp bench`: live servers with and without a head, measured beside each other."""
