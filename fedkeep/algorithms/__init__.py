"""One method a file. A new file here is found by itself; see CONTRIBUTING."""
