"""The only room that knows every parallelism: one model, or its pipeline stages, through the transforms."""
