"""Send many payloads from many threads and report the speed: many_prompts.py [NUM_PAYLOADS] [NUM_THREADS]"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import tandem

num_payloads = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
num_threads = int(sys.argv[2]) if len(sys.argv) > 2 else 128

# Threads share one client. The client retries refused payloads after the delay that the server requests.
with tandem.Client("127.0.0.1:50051", max_retries=100) as client:

    def send(number: int) -> tandem.Result:
        return client.generate(prompt=f"{number} and {number} make", max_new_tokens=16)

    started_s = time.monotonic()
    with ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(send, range(num_payloads)))
    elapsed_s = time.monotonic() - started_s

num_tokens = sum(result.usage.completion_tokens for result in results)
print(f"{num_payloads} payloads from {num_threads} threads in {elapsed_s:.1f} s: {num_tokens / elapsed_s:.0f} tokens/s")
