"""All text: chat templates, tokens, and text back from tokens. Workers only see token ids."""
