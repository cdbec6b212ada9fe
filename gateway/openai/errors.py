"""OpenAI's error bodies."""

from typing import Any

from starlette.responses import JSONResponse, Response

from gateway.errors import Problem

# The router's own names for its limits on length, in its messages.
_LENGTH_LIMITS = ("max_total_tokens", "max_input_length")


class OpenAIDialect:
    """What openai-python and its relatives understand."""

    name = "openai"

    def error_response(self, problem: Problem) -> Response:
        """{"error": {...}} with the status of the table."""
        return JSONResponse(error_body(problem), problem.row.openai.status, problem.headers)


def error_body(problem: Problem) -> dict[str, Any]:
    """Also what a stream that fails ends with."""
    row = problem.row.openai
    code = row.code
    if row.status == 400 and any(name in problem.message for name in _LENGTH_LIMITS):
        code = "context_length_exceeded"
    return {"error": {"message": problem.message, "type": row.type, "param": None, "code": code}}
