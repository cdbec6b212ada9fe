"""TGI's error bodies."""

from starlette.responses import JSONResponse, Response

from gateway.errors import Problem
from gateway.streaming import Json

_PREFIXES = {"validation": "Input validation error: ", "generation": "Request failed during generation: "}


class TgiDialect:
    """What text-generation and huggingface_hub understand: they look at `error_type`."""

    name = "tgi"

    def error_response(self, problem: Problem) -> Response:
        """{"error", "error_type"} with the status of the table."""
        return JSONResponse(error_body(problem), problem.row.tgi.status, problem.headers)


def error_body(problem: Problem) -> Json:
    """Also what a stream that fails ends with."""
    error_type = problem.row.tgi.error_type
    message = "Model is overloaded" if error_type == "overloaded" else problem.message
    return {"error": _PREFIXES.get(error_type, "") + message, "error_type": error_type}
