"""One method a file, in families. A new file here is found by itself; see CONTRIBUTING."""
