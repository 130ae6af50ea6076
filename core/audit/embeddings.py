"""Answers as embeddings of a frozen encoder, which is what the release's AFLite and heads work on (sheet A7).

The mean of the last hidden states over the answer's tokens, at unit length: our choice, since how the release pools is
not known. A head is a logistic regression on it; nothing of the encoder is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.core.models.load import context_length, load_model, load_tokenizer, resolve_model

if TYPE_CHECKING:
    from numpy import ndarray

BATCH_TEXTS = 32
MAX_TOKENS = 512


class Encoder:
    """A frozen encoder by the name of its folder. Raises Unavailable where it, or the packages it needs, are missing.

    Texts are embedded once and remembered; a text beyond `MAX_TOKENS` is cut.
    """

    def __init__(self, name: str) -> None:
        model = resolve_model(name)
        self._tokenizer = load_tokenizer(model).inner
        self._model = load_model(model, dtype="float32", is_encoder=True)
        # Models with learned positions that start after the padding's have two fewer than they say.
        self._max_tokens = min(MAX_TOKENS, context_length(model) - 2)
        self._known: dict[str, ndarray] = {}

    def __call__(self, texts: Sequence[str]) -> ndarray:
        """Embeddings of texts [n]: shape [n, width], float64, of length 1; zeros for a text without a token."""
        import numpy as np

        new = sorted({text for text in texts if text not in self._known}, key=lambda text: (len(text), text))
        for start in range(0, len(new), BATCH_TEXTS):
            some = new[start : start + BATCH_TEXTS]
            self._known.update(zip(some, self._embed(some), strict=True))
        return np.stack([self._known[text] for text in texts])

    def _embed(self, texts: list[str]) -> ndarray:
        import numpy as np
        import torch

        ids = self._tokenizer(texts, truncation=True, max_length=self._max_tokens)["input_ids"]
        longest = max(1, *map(len, ids))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids], device=self._model.device)
        with torch.inference_mode():
            states = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state
        # Selected and not multiplied: a row that is all padding may hold nan.
        summed = torch.where(mask[:, :, None] > 0, states, 0.0).sum(dim=1).double().cpu().numpy()
        return np.asarray(summed / np.maximum(np.linalg.norm(summed, axis=1, keepdims=True), 1e-12))


def embedding_head() -> Any:
    """Logistic regression on embeddings of unit length: L2 with C = 1, not standardised."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=1.0, max_iter=1000)


def held_out_logits(rows: ndarray, seen: ndarray) -> ndarray:
    """Logits [B, 2 n] of all rows by one head for each row of `seen` [B, n], fitted to the pairs that are 1 there.

    `rows` [n, 2, width], the right answer first.
    """
    import numpy as np

    flat, labels = rows.reshape(-1, rows.shape[2]), np.tile([1, 0], len(rows))
    fitted = np.repeat(seen > 0, 2, axis=1)
    return np.stack([embedding_head().fit(flat[one], labels[one]).decision_function(flat) for one in fitted])
