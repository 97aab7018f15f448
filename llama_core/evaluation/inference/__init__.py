"""A model that only computes: it scores and generates texts, on one device or divided among several."""
