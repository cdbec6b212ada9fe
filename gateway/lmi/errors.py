"""LMI's error bodies."""

from starlette.responses import JSONResponse, Response

from gateway.errors import Problem
from gateway.streaming import Json


class LmiDialect:
    """What clients of DJLServing understand."""

    name = "lmi"

    def error_response(self, problem: Problem) -> Response:
        """{"code", "error"} for requests that cannot be handled, {"code", "type", "message"} for all else."""
        return JSONResponse(error_body(problem), problem.row.lmi.status, problem.headers)


def error_body(problem: Problem) -> Json:
    """The body alone."""
    row = problem.row.lmi
    if row.type:
        return {"code": row.status, "type": row.type, "message": problem.message}
    prefix = "Input Parsing failed. " if problem.row.tgi.error_type == "validation" else ""
    return {"code": row.status, "error": prefix + problem.message}
