"""Text to token ids and back: bytes, built in, or the files of a Hugging Face or SentencePiece tokenizer."""
