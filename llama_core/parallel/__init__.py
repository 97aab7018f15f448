"""What is applied to a built model so that it trains on many devices, or on less memory."""
