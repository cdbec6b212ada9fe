"""What prefill and decode workers share that is not the model: settings, registration, drain."""
