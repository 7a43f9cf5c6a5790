"""Explorers: pictures that answer to a choice, for Jupyter and for pages of their own."""
