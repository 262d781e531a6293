"""The teacher's lm_head: exact top-K, fp32 logits, padding cut, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opd.device import HostProfile
from opd.score.head import BLOCK, TeacherHead, TopK
from tests.tiny_models import make_tiny

CPU = HostProfile.cpu(num_cpus=1)


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, k: int) -> TopK:
    logprobs = (hidden.double() @ weight.double().T).log_softmax(-1).float()
    top = logprobs.topk(k)
    return TopK(
        token_logprobs=logprobs.gather(1, targets[:, None])[:, 0],
        ids=top.indices.int(),
        logprobs=top.values,
        covered=(top.indices == targets[:, None]).any(1),
    )


def assert_same(given: TopK, expected: TopK, atol: float) -> None:
    torch.testing.assert_close(given.token_logprobs, expected.token_logprobs, atol=atol, rtol=0)
    torch.testing.assert_close(given.logprobs, expected.logprobs, atol=atol, rtol=0)
    torch.testing.assert_close(given.ids, expected.ids, atol=0, rtol=0)
    torch.testing.assert_close(given.covered, expected.covered, atol=0, rtol=0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary large enough for the search by blocks, and no multiple of a block."""
    return make_tiny(tmp_path_factory.mktemp("wide"), "llama", tied=True, vocab=5003, layers=1)


@pytest.mark.parametrize("k", [1, 8, 64, 4001])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_top_k_is_exact_over_the_ids_that_count(wide: Path, k: int, dtype: str) -> None:
    vocab = 4001
    assert vocab % BLOCK
    torch.manual_seed(0)
    weight = load_file(wide / "model.safetensors")["model.embed_tokens.weight"]
    hidden, targets = torch.randn(700, weight.shape[1]), torch.randint(vocab, (700,))
    if dtype == "bf16":
        weight, hidden = weight.bfloat16(), hidden.bfloat16()
    head = TeacherHead(wide, vocab_size=vocab, dtype="bf16" if dtype == "bf16" else "fp32", profile=CPU)
    expected = reference(hidden, weight[:vocab], targets, k)
    given = head.top_k(hidden, targets, k)
    # bf16 logits would be wrong by up to 0.03 here.
    torch.testing.assert_close(given.token_logprobs, expected.token_logprobs, atol=2e-5, rtol=0)
    torch.testing.assert_close(given.logprobs, expected.logprobs, atol=2e-5, rtol=0)
    # Neighbours may change places where their values are equal but for rounding.
    assert (given.ids == expected.ids).float().mean() > 0.999
    assert given.ids.max() < vocab
    torch.testing.assert_close(given.covered, (given.ids == targets[:, None]).any(1), atol=0, rtol=0)
    assert not given.covered.all() or k == vocab


def test_all_ids_make_a_distribution(wide: Path) -> None:
    head = TeacherHead(wide, vocab_size=5003, dtype="fp32", profile=CPU)
    given = head.top_k(torch.randn(5, 192), torch.zeros(5, dtype=torch.long), 5003)
    torch.testing.assert_close(given.logprobs.exp().sum(1), torch.ones(5))
    assert (given.ids.sort(1).values == torch.arange(5003)).all()


def test_equal_logits_keep_distinct_ids(wide: Path) -> None:
    head = TeacherHead(wide, vocab_size=5003, dtype="fp32", profile=CPU)
    given = head.top_k(torch.zeros(2, 192), torch.zeros(2, dtype=torch.long), 64)
    assert [len(set(row)) for row in given.ids.tolist()] == [64, 64]
    torch.testing.assert_close(given.logprobs, torch.full((2, 64), -float(torch.tensor(5003.0).log())))


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_found_in_one_file_or_many(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny(tmp_path / "one", "qwen3", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    hidden, targets = torch.randn(9, 192), torch.randint(512, (9,))
    expected = reference(hidden, model.lm_head.weight.detach(), targets, 8)
    for name in ("one", "many"):
        head = TeacherHead(tmp_path / name, vocab_size=512, dtype="fp32", profile=CPU)
        assert_same(head.top_k(hidden, targets, 8), expected, 1e-5)


def test_more_ids_than_the_teacher_has_are_refused(wide: Path) -> None:
    with pytest.raises(ValueError, match="5003 ids, fewer than the 5004"):
        TeacherHead(wide, vocab_size=5004, dtype="fp32", profile=CPU)


def test_a_model_whose_logits_are_not_a_projection_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))
    with pytest.raises(ValueError, match=r'logits_scaling.*scoring="prompt_logprobs"'):
        TeacherHead(tmp_path, vocab_size=512, dtype="fp32", profile=CPU)


def test_logits_that_are_not_finite_stop_the_run(wide: Path) -> None:
    head = TeacherHead(wide, vocab_size=5003, dtype="fp32", profile=CPU)
    with pytest.raises(FloatingPointError, match="not finite"):
        head.top_k(torch.full((1, 192), torch.nan), torch.zeros(1, dtype=torch.long), 8)
