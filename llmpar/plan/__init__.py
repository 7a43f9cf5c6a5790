"""What a user writes, and what is decided from it, without JAX: layouts, meshes, models, plans, schedules."""
