"""`mtp doctor`: what this machine can do, and what to fix. Starts without any heavy package."""
