"""How a run is divided over devices, what it holds in memory and what it costs: arithmetic only. Imports no torch."""
