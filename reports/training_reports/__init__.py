"""Reports: figures of a run's or a sweep's records, on one page that opens offline. Imports no torch."""
