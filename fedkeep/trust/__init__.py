"""Which replies are believed: checks, comparisons, robust aggregation, the standing of clients, and attacks."""
