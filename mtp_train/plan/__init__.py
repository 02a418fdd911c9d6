"""`mtp plan`: what a run will need, before it is started."""
