"""One token of each sequence through a recurrent layer, as engine/models/recurrent computes it in torch.

States are updated where they lie, in rows of the KV cache. A unit of work is a sequence's channels, or its value heads
that share a key head. Each reads and writes numbers of its own, so results depend neither on other sequences nor on the
number of threads.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.activations import activate
from engine.kernels.cpu.arguments import SILU, Convolution, Delta, Floats, Part, Scan, States
from engine.kernels.cpu.compiler import entry, jit
from engine.kernels.cpu.machine import LANES
from engine.kernels.cpu.vectors import address

_ONE = np.float32(1.0)
_MAX_EXPONENT = np.float32(80.0)
_LENGTH_EPS = np.float32(1e-6)


class _HeadToken(NamedTuple):
    """A token, as the rule sees it in one head."""

    q: Floats  # of length key_dim ** -0.5
    k: Floats  # of length 1
    v: Floats
    decay: np.float32
    strength: np.float32


@entry
def step_conv(conv: Convolution, states: States, rows: Floats, out: Floats, part: Part) -> None:
    """Compute one thread's part of ShortConv. rows: [num_seqs, 3 * channels]; out: [num_seqs, channels]."""
    channels = conv.taps.shape[1]
    for seq in range(len(rows) * part.number // part.num_parts, len(rows) * (part.number + 1) // part.num_parts):
        inputs = rows[seq, :channels] * rows[seq, 2 * channels :]
        _convolve(conv, states, seq, 0, inputs, out[seq])
        for i in range(channels):
            out[seq, i] *= rows[seq, channels + i]


@entry
def step_delta(delta: Delta, states: States, rows: Floats, out: Floats, part: Part) -> None:
    """Compute one thread's part of GatedDelta. rows: [num_seqs, projected]; out: [num_seqs, heads * value_dim]."""
    num_units = len(rows) * delta.num_key_heads
    for unit in range(num_units * part.number // part.num_parts, num_units * (part.number + 1) // part.num_parts):
        seq = unit // delta.num_key_heads
        _step_heads(delta, states, seq, unit % delta.num_key_heads, rows[seq], out[seq])


@entry
def step_scan(scan: Scan, states: States, rows: Floats, out: Floats, part: Part) -> None:
    """Compute one thread's part of SelectiveScan. rows: [num_seqs, projected]; out: [num_seqs, heads * value_dim]."""
    num_units = len(rows) * scan.num_key_heads
    for unit in range(num_units * part.number // part.num_parts, num_units * (part.number + 1) // part.num_parts):
        seq = unit // scan.num_key_heads
        _scan_heads(scan, states, seq, unit % scan.num_key_heads, rows[seq] * scan.factors, out[seq])


@jit
def _scan_heads(scan: Scan, states: States, seq: int, key_head: int, row: Floats, out: Floats) -> None:
    """The heads that share a key head, and their norm."""
    num_heads, key_dim, value_dim = len(scan.rate), scan.key_dim, scan.value_dim
    width, channels, num_past = num_heads * value_dim, scan.conv.taps.shape[1], len(scan.conv.taps) - 1
    k, q, v = _padded(key_dim), _padded(key_dim), _padded(value_dim)
    mixed, first_key = row[width:], width + key_head * key_dim
    _mix(scan.conv, states, seq, first_key, mixed, k[:key_dim])
    _mix(scan.conv, states, seq, first_key + scan.num_key_heads * key_dim, mixed, q[:key_dim])
    copies = num_heads // scan.num_key_heads
    for head in range(key_head * copies, (key_head + 1) * copies):
        first, end = head * value_dim, (head + 1) * value_dim
        _mix(scan.conv, states, seq, first, mixed, v[:value_dim])
        step = _softplus(row[width + channels + head] + scan.step_bias[head])
        step = min(max(step, scan.least_step), scan.most_step)
        matrix = num_past * channels + head * key_dim * value_dim
        token = _HeadToken(q[:key_dim], k[:key_dim], v[:value_dim], np.exp(scan.rate[head] * step), step)
        _scan_head(states, seq, matrix, token, out[first:end])
        for i in range(value_dim):
            out[first + i] += scan.skip[head] * v[i]
    first, end = key_head * copies * value_dim, (key_head + 1) * copies * value_dim
    gate = _padded(end - first)
    gate[: end - first] = row[first:end]
    activate(address(gate), len(gate) // LANES, SILU)
    _gate_and_norm(scan, first, gate, out[first:end])


@jit
def _scan_head(states: States, seq: int, first: int, token: _HeadToken, out: Floats) -> None:
    """One head's matrix, which begins at number `first` of the state. A token's strength is its step."""
    num_values, is_kept = len(token.v), states.is_kept[seq]
    out[:] = np.float32(0.0)
    for i in range(len(token.k)):
        done, key = 0, token.k[i] * token.strength
        while done < num_values:
            numbers = _numbers(states, seq, first + i * num_values + done, num_values - done)
            end = done + len(numbers)
            _add_and_read(numbers, token.decay, key, token.q[i], token.v[done:end], out[done:end], is_kept)
            done = end


@jit
def _add_and_read(
    numbers: Floats, decay: np.float32, key: np.float32, query: np.float32, values: Floats, out: Floats, is_kept: bool
) -> None:
    for i in range(len(numbers)):
        number = decay * numbers[i] + key * values[i]
        out[i] += number * query
        if is_kept:
            numbers[i] = number


@jit
def _gate_and_norm(scan: Scan, first: int, gate: Floats, out: Floats) -> None:
    """The gate, and the norm whose weights begin at `first`."""
    has_norm, factor = len(scan.norm) > 0, _ONE
    if scan.gate_first or not has_norm:
        for i in range(len(out)):
            out[i] *= gate[i]
    if not has_norm:
        return
    factor = _ONE / np.sqrt(_squares(out) / np.float32(len(out)) + scan.eps)
    for i in range(len(out)):
        out[i] *= factor * scan.norm[first + i] * (_ONE if scan.gate_first else gate[i])


@jit
def _step_heads(delta: Delta, states: States, seq: int, key_head: int, row: Floats, out: Floats) -> None:
    """The value heads that share a key head."""
    num_heads, key_dim, value_dim = len(delta.rate), delta.key_dim, len(delta.norm)
    key_width, channels = delta.num_key_heads * key_dim, delta.conv.taps.shape[1]
    q, k, v, gate = _padded(key_dim), _padded(key_dim), _padded(value_dim), _padded(value_dim)
    _mix(delta.conv, states, seq, key_head * key_dim, row, q[:key_dim])
    _mix(delta.conv, states, seq, key_width + key_head * key_dim, row, k[:key_dim])
    q_length, k_length = _inverse_length(q[:key_dim]) / np.sqrt(np.float32(key_dim)), _inverse_length(k[:key_dim])
    for i in range(key_dim):
        q[i] *= q_length
        k[i] *= k_length
    copies = num_heads // delta.num_key_heads
    for head in range(key_head * copies, (key_head + 1) * copies):
        first, end = head * value_dim, (head + 1) * value_dim
        _mix(delta.conv, states, seq, 2 * key_width + first, row, v[:value_dim])
        numbers = row[channels + num_heads * value_dim :]
        strength = _ONE / (_ONE + np.exp(min(-numbers[head], _MAX_EXPONENT)))
        decay = np.exp(delta.rate[head] * _softplus(numbers[num_heads + head] + delta.rate_bias[head]))
        matrix = (len(delta.conv.taps) - 1) * channels + head * key_dim * value_dim
        token = _HeadToken(q[:key_dim], k[:key_dim], v[:value_dim], decay, strength)
        _step_head(states, seq, matrix, token, out[first:end])
        gate[:value_dim] = row[channels + first : channels + end]
        activate(address(gate), len(gate) // LANES, SILU)
        factor = _ONE / np.sqrt(_squares(out[first:end]) / np.float32(value_dim) + delta.eps)
        for i in range(value_dim):
            out[first + i] *= factor * delta.norm[i] * gate[i]


@jit
def _step_head(states: States, seq: int, first: int, token: _HeadToken, out: Floats) -> None:
    """One head's matrix, which begins at number `first` of the state: read once for its products with key and query,
    and once more to be updated.
    """
    q, k, v, decay, strength = token
    num_values, product = len(v), np.float32(0.0)
    change = np.zeros(num_values, np.float32)
    out[:] = np.float32(0.0)
    for i in range(len(k)):
        product += q[i] * k[i]
        done = 0
        while done < num_values:
            numbers = _numbers(states, seq, first + i * num_values + done, num_values - done)
            end = done + len(numbers)
            _add_products(numbers, k[i], q[i], change[done:end], out[done:end])
            done = end
    for j in range(num_values):
        change[j] = (v[j] - decay * change[j]) * strength
        out[j] = decay * out[j] + product * change[j]
    if not states.is_kept[seq]:
        return
    for i in range(len(k)):
        done = 0
        while done < num_values:
            numbers = _numbers(states, seq, first + i * num_values + done, num_values - done)
            _decay_and_add(numbers, decay, k[i], change[done : done + len(numbers)])
            done += len(numbers)


@jit
def _add_products(numbers: Floats, key: np.float32, query: np.float32, by_key: Floats, by_query: Floats) -> None:
    for i in range(len(numbers)):
        by_key[i] += numbers[i] * key
        by_query[i] += numbers[i] * query


@jit
def _decay_and_add(numbers: Floats, decay: np.float32, key: np.float32, change: Floats) -> None:
    for i in range(len(numbers)):
        numbers[i] = decay * numbers[i] + key * change[i]


@jit
def _mix(conv: Convolution, states: States, seq: int, first: int, row: Floats, out: Floats) -> None:
    """SiLU of the convolution, for channels [first, first + len(out)). `out` is padded to whole vectors."""
    _convolve(conv, states, seq, first, row[first : first + len(out)], out)
    activate(address(out), -(-len(out) // LANES), SILU)


@jit
def _convolve(conv: Convolution, states: States, seq: int, first: int, inputs: Floats, out: Floats) -> None:
    """Channels [first, first + len(out)) of the convolution."""
    num_past, channels, count = len(conv.taps) - 1, conv.taps.shape[1], len(out)
    for i in range(count):
        out[i] = conv.bias[first + i] + conv.taps[num_past, first + i] * inputs[i]
    past = np.empty(count, np.float32)
    for tap in range(num_past):
        _read(states, seq, tap * channels + first, past)
        for i in range(count):
            out[i] += conv.taps[tap, first + i] * past[i]
        if states.is_kept[seq] and tap > 0:
            _write(states, seq, (tap - 1) * channels + first, past)
    if states.is_kept[seq]:
        _write(states, seq, (num_past - 1) * channels + first, inputs)


@jit
def _numbers(states: States, seq: int, first: int, count: int) -> Floats:
    """Up to `count` numbers of a state from number `first` on: those in the same row of the cache."""
    width = states.rows.shape[1]
    number, offset = first // width, first % width
    row = states.tables[seq, states.block[number]] * states.in_piece + states.first[number]
    return states.rows[row, offset : min(width, offset + count)]


@jit
def _read(states: States, seq: int, first: int, out: Floats) -> None:
    """Numbers [first, first + len(out)) of a state."""
    done = 0
    while done < len(out):
        numbers = _numbers(states, seq, first + done, len(out) - done)
        out[done : done + len(numbers)] = numbers
        done += len(numbers)


@jit
def _write(states: States, seq: int, first: int, values: Floats) -> None:
    """Numbers [first, first + len(values)) of a state."""
    done = 0
    while done < len(values):
        numbers = _numbers(states, seq, first + done, len(values) - done)
        numbers[:] = values[done : done + len(numbers)]
        done += len(numbers)


@jit
def _padded(count: int) -> Floats:
    """Room for whole vectors."""
    return np.zeros(-(-count // LANES) * LANES, np.float32)


@jit
def _softplus(x: np.float32) -> np.float32:
    """log(1 + e^x)."""
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))


@jit
def _inverse_length(x: Floats) -> np.float32:
    return _ONE / np.sqrt(_squares(x) + _LENGTH_EPS)


@jit
def _squares(x: Floats) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total
