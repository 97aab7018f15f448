"""Tasks of lm-evaluation-harness: read from folders without executing anything, limited, and asked of our models."""
