"""Plans: how a run is divided over devices, its memory and its cost. Arithmetic only; imports no torch."""
