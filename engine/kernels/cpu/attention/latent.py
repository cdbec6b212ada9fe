"""Multi-head latent attention inside the loop over layers, as engine/models/latent.py computes it.

Queries are projected to the latent and results from it head by head, with matrices in panels of 16 columns. All
threads share out the panels, so each is read once for all rows.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import (
    DEPTH,
    Address,
    Array,
    Attending,
    Cache,
    Floats,
    Matrix,
    Operand,
    Part,
    Range,
    Weights,
)
from engine.kernels.cpu.attention.cache_rows import TokenSlot, call_write_token
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, PANEL
from engine.kernels.cpu.products.panels import call_panel_product
from engine.kernels.cpu.products.tiles import TileProduct
from engine.kernels.cpu.rows import Norm, norm_row, put_row_at, rotate
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import address


class Latent(NamedTuple):
    """The parameters of latent attention. Without it `rank` is 0 and the arrays are empty. Panels are fp32 or fp16."""

    q_norms: Floats  # [num_layers, 1, query_rank]
    kv_norms: Floats  # [num_layers, 1, rank]
    key_up: Array  # [num_layers, num_heads, rank / 16, plain, 16]
    value_up: Array  # [num_layers, num_heads, width / 16, rank, 16]
    query_rank: int  # 0: queries are projected at once
    rank: int
    rotated: int  # dimensions of a query, besides `plain` ones
    plain: int
    width: int  # of a head's result
    eps: np.float32
    multiply: Address  # of panels.panel_product


class LatentRows(NamedTuple):
    """Buffers of a layer with latent attention, which the threads share. All are flat."""

    projected: Floats  # [num_tokens, queries or their latent, latent of KV, rotated key]
    queries: Floats  # [num_tokens, num_heads, rotated and plain dimensions]; of [num_tokens, query_rank] no use
    results: Floats  # [num_tokens, num_heads, width]
    step: int  # of `projected`
    query_step: int  # of `queries`


@jit
def put_queries(
    latent: Latent, layer: int, rows: LatentRows, weights: Weights, matrix: int, operand: Operand, own: Range
) -> None:
    """Write the normed latents of queries to the operand of their second projection."""
    depth, normed = weights.matrices[matrix, DEPTH], np.empty(latent.query_rank, np.float32)
    norm = Norm(latent.q_norms[layer], latent.eps)
    for r in range(own.first, own.end):
        divisor = norm_row(rows.projected[r * rows.step : r * rows.step + latent.query_rank], norm, normed)
        operand.factors[r] = put_row_at(normed, weights, matrix, operand, r * depth) / divisor


@jit
def rotate_and_store_latents(
    latent: Latent, layer: int, rows: LatentRows, attending: Attending, cache: Cache, rope: int, own: Range
) -> None:
    """Write the latents and rotated keys of the rows in the range to the cache, where they are keys and values at once,
    and the rotated dimensions of their queries to those of attention.
    """
    shape, batch, queries = attending.shape, attending.batch, attending.queries
    rotations = batch.rotations
    layer_at = address(cache) + shape.num_planes * layer * shape.num_slots * shape.row_bytes
    rotated, key = latent.rotated, np.empty(shape.head_dim, np.float32)
    norm = Norm(latent.kv_norms[layer], latent.eps)
    for r in range(own.first, own.end):
        cos, sin = rotations.cos[rope, rotations.rows[r]], rotations.sin[rope, rotations.rows[r]]
        end = (r + 1) * rows.step
        for i in range(rotated):
            key[i] = rows.projected[end - rotated + i]
        rotate(key[:rotated], cos, sin)
        divisor = norm_row(rows.projected[end - rotated - latent.rank : end - rotated], norm, key[rotated:])
        for i in range(rotated, len(key)):
            key[i] /= divisor
        slot = TokenSlot(layer_at, batch.slots[r, 0])
        call_write_token(attending.code.write_token, (address(key), address(key), slot, shape))
        for head in range(shape.num_heads):
            at = r * rows.query_step + head * (rotated + latent.plain)
            first = r * queries.step + head * shape.head_dim
            for i in range(rotated):
                queries.rows[first + i] = rows.queries[at + i]
            rotate(queries.rows[first : first + rotated], cos, sin)
            if len(rotations.query_factors):
                for i in range(rotated):
                    queries.rows[first + i] *= rotations.query_factors[rope, rotations.rows[r]]


@jit
def project_queries(latent: Latent, layer: int, rows: LatentRows, attending: Attending, rope: int, part: Part) -> None:
    """Project the other dimensions of all queries to the latent: one thread's part of the columns."""
    shape, queries, rotations = attending.shape, attending.queries, attending.batch.rotations
    num_panels, num_rows = latent.rank // PANEL, len(attending.batch.slots)
    panels = address(latent.key_up) + layer * latent.key_up[0].nbytes
    num_units = shape.num_heads * num_panels
    own = share_of(num_units, part.number, part.num_parts)
    for unit in range(own.first, own.end):
        head, panel = unit // num_panels, unit % num_panels
        column = head * (latent.rotated + latent.plain) + latent.rotated
        a = Matrix(address(rows.queries) + column * FLOAT_BYTES, rows.query_step * FLOAT_BYTES)
        column = head * shape.head_dim + latent.rotated + panel * PANEL
        out = Matrix(address(queries.rows) + column * FLOAT_BYTES, queries.step * FLOAT_BYTES)
        b = Matrix(panels + unit * latent.key_up[0, 0, 0].nbytes, 0)
        call_panel_product(latent.multiply, (TileProduct(a, b, out), latent.plain, num_rows))
        if len(rotations.query_factors):
            for r in range(num_rows):
                for i in range(r * queries.step + column, r * queries.step + column + PANEL):
                    queries.rows[i] *= rotations.query_factors[rope, rotations.rows[r]]


@jit
def project_results(latent: Latent, layer: int, rows: LatentRows, attending: Attending, part: Part) -> None:
    """Project attention's results, which are latents, to those of the heads: one thread's part of the columns."""
    shape, queries = attending.shape, attending.queries
    num_panels, num_rows = latent.width // PANEL, len(attending.batch.slots)
    panels = address(latent.value_up) + layer * latent.value_up[0].nbytes
    num_units = shape.num_heads * num_panels
    own = share_of(num_units, part.number, part.num_parts)
    for unit in range(own.first, own.end):
        column = unit // num_panels * shape.head_dim + latent.rotated
        a = Matrix(address(queries.out) + column * FLOAT_BYTES, queries.out_step * FLOAT_BYTES)
        out = Matrix(address(rows.results) + unit * PANEL * FLOAT_BYTES, num_units * PANEL * FLOAT_BYTES)
        b = Matrix(panels + unit * latent.value_up[0, 0, 0].nbytes, 0)
        call_panel_product(latent.multiply, (TileProduct(a, b, out), latent.rank, num_rows))
