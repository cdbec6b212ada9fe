"""LMI's API (DJLServing's large model inference), and the routes that AWS's SDKs call."""
