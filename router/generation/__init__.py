"""One request from its admission to its last token: service, dispatch, attempts, replay and the answer stream."""
