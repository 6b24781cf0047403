"""Small helpers without knowledge of federated learning, except for the names of random generators."""
