"""What happens between the steps of a training loop; ``part.py`` says what a part is."""
