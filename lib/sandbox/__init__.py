"""Where code written by a model runs."""
