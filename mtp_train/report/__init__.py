"""One HTML file that says whether a head should be served, and shows what that is founded on."""
