"""The whole line on a few of the user's own prompts, before anybody pays for a dump."""
