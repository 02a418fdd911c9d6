"""MTP weights that a target's own checkpoint holds: read, compared, described and put back."""
