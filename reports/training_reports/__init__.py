"""What a run did, drawn: figures from its records, and one page that opens offline. Imports no torch."""
