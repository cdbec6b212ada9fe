"""The model families: functions from config.json to ModelConfig. Their table is in `engine/models/read_config.py`."""
