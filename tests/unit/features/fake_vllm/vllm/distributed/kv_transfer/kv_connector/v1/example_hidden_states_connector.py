"""Only looked for."""
