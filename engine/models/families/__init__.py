"""The model families: functions from config.json to ModelConfig. `engine/models/config.py` has the table of them."""
