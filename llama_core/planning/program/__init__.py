"""What one layer of a model computes, as data: what it keeps, holds, multiplies and sends follows from it."""
