"""Domain types of the mesh: standard library only, no I/O.

request.py                      SequenceSpec, SamplingParams and their limits: one attempt at one choice of a request
structure.py                    structured output: the form that a text must have
cache_hints.py                  how a client wants the KV of its request to be kept
tokens.py                       sampled tokens, and how a sequence ends
prefill.py                      messages between router and prefill worker about one prompt
kv.py, kv_groups.py             the shape of KV, and the parts that ranks hold
block_hashes.py                 the hashes that name blocks of KV in prefix caches
worker.py                       a worker's identity, load and state
host.py                         cores and network addresses
json_text.py                    JSON that others have written
errors.py                       all errors, in one tree
"""
