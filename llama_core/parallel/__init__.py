"""Changes to a built model that let it train on many devices, or in less memory."""
