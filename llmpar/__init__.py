"""llmpar: learn, plan and run LLM parallelism in JAX. A layout is a line of text, a movement is an arrow."""

__version__ = "0.1.0"
