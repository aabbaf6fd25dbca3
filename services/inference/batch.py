"""The running batch: a slab of keys and values with one row per sequence, and the two forward passes.

Invariant: rows 0..len(batch)-1 are in use and packed; row i holds exactly `lengths[i]` positions, from
column 0. Columns behind that are garbage and masked. So no padding ever sits inside a sequence, positions
are exact, and joining or leaving the batch costs at most one row's copy.
"""

from __future__ import annotations

import torch

COLUMN_STEP = 64
ROW_STEP = 16
"""The slab grows in multiples of these: each growth copies it."""


class Slab:
    """Keys and values of all rows, handed to the model in the place of a transformers cache.

    Per layer two tensors (rows, kv heads, columns, head dim), allocated at the first write.
    """

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        """Positions (rows times columns) beyond which spare rows or columns are given back."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = 0
        self._columns = 0
        self._write_rows: slice | torch.Tensor = slice(0, 0)
        self._write_columns: slice | torch.Tensor = slice(0, 0)
        self._read: tuple[int, int] | None = None

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of up to `columns` positions; keeps what those have stored."""
        if rows <= self._rows and columns <= self._columns:
            return
        rows, columns = _ceil(rows, ROW_STEP), _ceil(columns, COLUMN_STEP)
        if max(rows, self._rows) * max(columns, self._columns) <= self._capacity:
            rows, columns = max(rows, self._rows), max(columns, self._columns)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = _resized(old, rows, columns)
        self._rows, self._columns = rows, columns

    def clear(self) -> None:
        """Give the memory back and forget everything."""
        self._keys, self._values, self._rows, self._columns = [], [], 0, 0

    def aim_prefill(self, first_row: int, rows: int, columns: int) -> None:
        """The next forward fills columns 0..columns-1 of new rows and attends to those alone."""
        self._write_rows = slice(first_row, first_row + rows)
        self._write_columns = slice(0, columns)
        self._read = None

    def aim_decode(self, positions: torch.Tensor, columns: int) -> None:
        """The next forward writes one column per row, at `positions` (rows,), and attends to `columns`."""
        self._write_rows = torch.arange(len(positions))
        self._write_columns = positions
        self._read = (len(positions), columns)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of row `source` over row `target`."""
        for tensors in (self._keys, self._values):
            for layer in tensors:
                layer[target, :, :length] = layer[source, :, :length]

    # What transformers' attention layers call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (rows, kv heads, new columns, head dim) and return what this forward attends to."""
        if layer_idx == len(self._keys):
            shape = (self._rows, key_states.shape[1], self._columns)
            self._keys.append(key_states.new_zeros((*shape, key_states.shape[3])))
            self._values.append(value_states.new_zeros((*shape, value_states.shape[3])))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._read is None:
            keys[self._write_rows, :, self._write_columns] = key_states
            values[self._write_rows, :, self._write_columns] = value_states
            return key_states, value_states
        # Two index tensors around a slice put the indexed dimension first: (rows, kv heads, head dim).
        keys[self._write_rows, :, self._write_columns] = key_states[:, :, 0]
        values[self._write_rows, :, self._write_columns] = value_states[:, :, 0]
        rows, columns = self._read
        return keys[:rows, :, :columns], values[:rows, :, :columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; nothing may be derived from this."""
        return 0


def _ceil(value: int, step: int) -> int:
    return -(-value // step) * step


def _resized(old: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    # Zeros, not garbage: a masked place has weight 0, and 0 times a stray NaN would still be NaN.
    new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
    rows, columns = min(rows, old.shape[0]), min(columns, old.shape[2])
    new[:rows, :, :columns] = old[:rows, :, :columns]
    return new


class Batch:
    """Forward passes over packed rows; knows token ids and lengths, nothing of requests."""

    def __init__(self, model: torch.nn.Module, capacity: int):
        """`capacity`: positions of the key-value cache; see `Slab`."""
        self._body = model.base_model
        self.head = model.get_output_embeddings()
        """Hidden states (…, width) → logits (…, vocabulary)."""
        self._slab = Slab(capacity)
        self.lengths: list[int] = []
        """Positions stored per row."""

    def __len__(self) -> int:
        return len(self.lengths)

    def prefill(self, prompts: list[list[int]], reserve_columns: int) -> torch.Tensor:
        """Append one row per prompt; returns the hidden states (prompts, longest, width).

        Behind a shorter prompt they are garbage.

        `reserve_columns`: positions that the longest row in the batch can come to need.
        """
        first, count, longest = len(self), len(prompts), max(map(len, prompts))
        self._slab.reserve(first + count, max(longest, reserve_columns))
        self._slab.aim_prefill(first, count, longest)
        ids = torch.zeros((count, longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        # Padding stands on the right, where causal attention hides it from every real token.
        mask = torch.ones((longest, longest), dtype=torch.bool).tril().expand(count, 1, longest, longest)
        positions = torch.arange(longest).expand(count, longest)
        hidden = self._forward(ids, positions, mask)
        self.lengths.extend(map(len, prompts))
        return hidden

    def decode(self, token_ids: list[int]) -> torch.Tensor:
        """Feed each row its newest token, (rows,); returns the next logits (rows, vocabulary)."""
        positions = torch.tensor(self.lengths)
        columns = max(self.lengths) + 1
        self._slab.aim_decode(positions, columns)
        mask = torch.arange(columns).unsqueeze(0) <= positions.unsqueeze(1)
        hidden = self._forward(
            torch.tensor(token_ids).unsqueeze(1), positions.unsqueeze(1), mask[:, None, None, :]
        )
        self.lengths = [length + 1 for length in self.lengths]
        return self.head(hidden[:, 0])

    def remove(self, row: int) -> None:
        """Free `row`; the last row takes its place."""
        last = len(self) - 1
        if row != last:
            self._slab.move(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def clear(self) -> None:
        """Drop all rows."""
        self.lengths = []
        self._slab.clear()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._body(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._slab,
            use_cache=True,
        ).last_hidden_state
