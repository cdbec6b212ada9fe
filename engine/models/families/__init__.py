"""The model families: functions from config.json to ModelConfig. `engine/models/read_config.py` has the table of them."""
