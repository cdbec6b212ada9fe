"""Many payloads from many threads: many_payloads.py [NUM_PAYLOADS] [NUM_THREADS] [MAX_TOKENS]"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

num_payloads, num_threads, max_tokens = (
    int(argument) for argument in [*sys.argv[1:], *("1000", "128", "16")[len(sys.argv) - 1 :]]
)
url = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8080")
# Threads share one client. The client retries refused payloads after the delay that the server requests.
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"), max_retries=100)
model = client.models.list().data[0].id


def send(number: int) -> int:
    prompt = f"{number} and {number} make"
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0)
    return answer.usage.completion_tokens if answer.usage else 0


started_s = time.monotonic()
with ThreadPoolExecutor(num_threads) as pool:
    num_tokens = sum(pool.map(send, range(num_payloads)))
elapsed_s = time.monotonic() - started_s
print(f"{num_payloads} payloads from {num_threads} threads in {elapsed_s:.1f} s: {num_tokens / elapsed_s:.0f} tokens/s")
