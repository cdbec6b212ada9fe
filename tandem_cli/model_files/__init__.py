"""The work of commands that read or write models: convert, quantize, partition, compile."""
