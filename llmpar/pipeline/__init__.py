"""A stage of the model, its backward pass in two parts, and the executor of any schedule."""
