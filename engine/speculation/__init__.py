"""Speculative decoding: draft some tokens ahead, verify them in one step, keep those that were right.

All of it is pure: DraftModel and MtpDrafter run torch only through a Runner.

The step samples at every draft exactly as plain decoding would, with the token's own random draw, and emits the sampled
tokens. A draft only decides whether the token sampled after it counts. So the output equals that of plain decoding,
whatever the drafts are, and replays are exact (Leviathan et al. 2023, with the target's own draw instead of a coin).
"""
