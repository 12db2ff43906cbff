"""Token ids to text and back: tokenizer, chat format, output parser. Knows nothing about weights."""
