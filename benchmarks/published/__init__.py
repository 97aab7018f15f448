"""Predict the GPU memory of other frameworks' training runs, and compare it with their published figures."""

from benchmarks.published.comparison import Ledger, ledger, write_predictions
from benchmarks.published.prediction import Prediction, predict, read_rows

__all__ = ["Ledger", "Prediction", "ledger", "predict", "read_rows", "write_predictions"]
