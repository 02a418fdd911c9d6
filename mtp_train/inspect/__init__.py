"""`mtp inspect`: a linter for directories of draft heads."""
