"""The prefill worker: computes prompts and sends their KV to decode workers. Start reading at service.py."""
