"""Language models: finding and loading one, and generating text with it."""
