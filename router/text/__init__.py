"""Text: templates, tokens, and text back from tokens. Workers see token ids only."""
