"""Which mesh, and why not the others; and the program of a cluster that is not here."""
