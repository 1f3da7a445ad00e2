"""Running a model: build it, fill a step's context, run it, sample, generate."""
