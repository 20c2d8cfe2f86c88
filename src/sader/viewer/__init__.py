"""`sader serve`: a local page to look at scenes and results, and the same service as an OGC API - Processes."""
