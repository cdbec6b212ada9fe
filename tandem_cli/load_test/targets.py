"""A mesh as a target: sends requests over gRPC through the SDK."""

import tandem
from tandem_cli.load_test.jobs import Job
from tandem_cli.load_test.load import OnToken, Reply, Target
from tandem_cli.load_test.records import Failed, Refused

_FINISH_REASONS = (tandem.FinishReason.LENGTH, tandem.FinishReason.EOS_TOKEN, tandem.FinishReason.STOP_SEQUENCE)


def arguments(job: Job, model: str | None) -> tandem.GenerateArguments:
    """The arguments of the SDK for a job."""
    return {
        "token_ids": job.token_ids,
        "prompt": job.prompt,
        "messages": job.messages,
        "model": model,
        "max_new_tokens": job.max_tokens,
        "ignore_eos": job.ignore_eos,
    }


def mesh_target(client: tandem.AsyncClient, model: str | None = None) -> Target:
    """A target that sends jobs to a mesh. `client` must not retry, which would hide refusals."""

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
        return complete_reply(reason, usage)

    return send


def complete_reply(reason: tandem.FinishReason | None, usage: tandem.Usage) -> Reply:
    """The token counts of a complete answer. Raises Failed for an incomplete one."""
    if reason not in _FINISH_REASONS:
        raise Failed(f"the answer ended with: {reason}")
    return Reply(usage.completion_tokens, usage.prompt_tokens)


def as_failure(error: tandem.TandemError) -> Refused | Failed:
    """Convert an error of the SDK to one of the load generator."""
    kind = Refused if isinstance(error, tandem.Overloaded) else Failed
    return kind(f"{type(error).__name__}: {error}")
