"""Speculative decoding: guess some tokens ahead, compute them in one step, keep those that were right.

Pure: acceptance, cost, ngram, speculator. Torch: draft_model.

The step samples after every guess as it always does, with the token's own random draw, and what it samples is what is
emitted; a guess only decides whether what was sampled after it counts. So the tokens are those of plain decoding,
whatever is guessed, and so are replays (Leviathan et al. 2023, with the target's own draw in place of their coin).
"""
