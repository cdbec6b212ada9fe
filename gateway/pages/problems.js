// What went wrong, in the words of the person who asked: what happened, and what can be done.

const TOO_LONG = /max_total_tokens|max_input|context length|maximum context|too many tokens|exceed/i;

/** Title and advice for an error of the gateway. */
export function explain(error) {
  const { status, message, retryAfter } = error;
  if (status === 0) return ["The gateway cannot be reached.", "Your network may be down, or the gateway has stopped. What has been said is kept."];
  if (status === 401) return ["This mesh asks for an API key.", "Enter it under Settings, then try again."];
  if (status === 403) return ["This API key may not do that.", "Enter another one under Settings."];
  if (status === 404) return ["This model is no longer served.", "Choose another one above."];
  if (status === 413 || TOO_LONG.test(message)) return ["The conversation is longer than the model can read.", "Delete or shorten messages, lower the maximum of tokens, or begin a new chat."];
  if (status === 429) return ["The mesh is busy.", retryAfter ? `Try again in ${retryAfter} s.` : "Try again in a moment."];
  if (status === 503) return ["No worker can answer now.", "A model may be loading, or a worker is being started again. Try again in a moment."];
  if (status === 504 || status === 408) return ["The answer took too long.", "Try again, or ask for a shorter one."];
  if (status === 400 || status === 422) return ["The mesh does not accept these settings.", "What it says is below."];
  return ["The answer broke off.", "A worker failed, and no other could take over. Try again."];
}
