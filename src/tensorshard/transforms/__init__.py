"""Model to model, one transform a file. A model never knows that it is parallel."""
