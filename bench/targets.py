"""A mesh as a target: requests over gRPC, through the SDK."""

import tandem
from bench.jobs import Job
from bench.load import OnToken, Reply, Target
from bench.records import Failed, Refused

_WHOLE = (tandem.FinishReason.LENGTH, tandem.FinishReason.EOS_TOKEN, tandem.FinishReason.STOP_SEQUENCE)


def arguments(job: Job, model: str | None) -> tandem.GenerateArguments:
    """A job as the SDK takes it."""
    return {
        "token_ids": job.token_ids,
        "prompt": job.prompt,
        "messages": job.messages,
        "model": model,
        "max_new_tokens": job.max_tokens,
        "ignore_eos": job.ignore_eos,
    }


def mesh_target(client: tandem.AsyncClient, model: str | None = None) -> Target:
    """Send jobs to a mesh. The client must not retry by itself, or refusals are hidden."""

    async def send(job: Job, on_token: OnToken) -> Reply:
        usage = tandem.Usage()
        reason: tandem.FinishReason | None = None
        try:
            async for event in client.stream(**arguments(job, model)):
                if event.token is not None:
                    on_token()
                reason, usage = event.finish_reason, event.usage or usage
        except tandem.TandemError as error:
            raise as_failure(error) from error
        return whole(reason, usage)

    return send


def whole(reason: tandem.FinishReason | None, usage: tandem.Usage) -> Reply:
    """The counts of an answer that ended well. Raises Failed for others."""
    if reason not in _WHOLE:
        raise Failed(f"the answer ended with: {reason}")
    return Reply(usage.completion_tokens, usage.prompt_tokens)


def as_failure(error: tandem.TandemError) -> Refused | Failed:
    """The SDK's errors in the load generator's words."""
    kind = Refused if isinstance(error, tandem.Overloaded) else Failed
    return kind(f"{type(error).__name__}: {error}")
