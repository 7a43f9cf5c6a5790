"""The same in the reader's hands: explorers for Jupyter and for pages of their own."""
