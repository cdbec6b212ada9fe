"""What a user of the text-generation package writes, run with a Python that has it: BASE_URL as argument.

The package needs an older huggingface_hub than this project, so it lives in an environment of its own.
"""

import json
import sys

from text_generation import Client
from text_generation.errors import OverloadedError, ValidationError

client = Client(sys.argv[1], timeout=30)
whole = client.generate("One fine", max_new_tokens=6, decoder_input_details=True)
stream = list(client.generate_stream("One fine", max_new_tokens=6))
errors = []
for max_new_tokens in (100_000, 5):  # the first breaks a rule; the second is refused as overloaded
    try:
        client.generate("One fine", max_new_tokens=max_new_tokens)
    except (ValidationError, OverloadedError) as error:
        errors.append(type(error).__name__)
told = {
    "text": whole.generated_text,
    "finish_reason": whole.details.finish_reason.value,
    "generated_tokens": whole.details.generated_tokens,
    "prefill": len(whole.details.prefill),
    "tokens": [token.text for token in whole.details.tokens],
    "streamed": [response.token.text for response in stream],
    "last": stream[-1].generated_text,
    "errors": errors,
}
sys.stdout.write(json.dumps(told))
