"""What would it cost? Formulas, chips, traffic, memory: plain arithmetic, no JAX."""
