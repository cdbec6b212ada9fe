"""Batches: files of requests in OpenAI's format, answered with capacity that nobody else uses.

`tandem batch` sends a file of its own machine to a gateway. With a `batch_folder`, the gateway keeps its callers' files
and batches too, and sends their requests to itself:

    POST /v1/files ─▶ store.py ─▶ POST /v1/batches ─▶ runner.py: check, then send.py, as a client without a socket
"""
