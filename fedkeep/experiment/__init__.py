"""Experiments: from recipes in TOML files to trials in run folders."""
