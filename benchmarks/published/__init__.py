"""What others' training runs hold on a GPU, checked against the figures they have published."""

from benchmarks.published.comparison import Ledger, ledger, write_predictions
from benchmarks.published.prediction import Prediction, predict, read_rows

__all__ = ["Ledger", "Prediction", "ledger", "predict", "read_rows", "write_predictions"]
