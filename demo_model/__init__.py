"""The bundled demonstration model: its data, its training and its evaluation."""
