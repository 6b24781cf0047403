"""Methods whose clients train at the same time from one model; the server aggregates their models."""
