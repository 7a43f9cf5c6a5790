"""The former address of `llmpar.exercises.lesson`, for lessons that still ask here."""

from llmpar.exercises.lesson import *  # noqa: F403
