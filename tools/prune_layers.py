"""Search for the layers whose removal harms a model least: `python tools/prune_layers.py MODEL --steps 10`.

Greedy: each step tries to drop every layer that is left, measures the forward KL (nats per response token) from the
whole model to the cut one on worked answers of reasoning_gym's gsm_symbolic, and drops the layer that harms least.
Prints a Markdown table; docs/decisions/003-pruned-student.md keeps the one for the built-in student.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import reasoning_gym
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from opd.builtin_models import drop_layers, resolve_model


def read_answers(tokenizer: PreTrainedTokenizerBase, rows: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    """Give the ids of `rows` worked answers, each [1, P+R] with its P."""
    answers = []
    for row in reasoning_gym.create_dataset("gsm_symbolic", size=rows, seed=seed):
        chat = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert isinstance(prompt, str)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        response_ids = tokenizer(row["metadata"]["answer_cot"], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt_ids + response_ids + [tokenizer.eos_token_id]])
        answers.append((ids, len(prompt_ids)))
    return answers


class Prober:
    """Measures a model with some of its layers; a run remembers the input of each layer, to start later runs there."""

    def __init__(self, model: LlamaForCausalLM, answers: list[tuple[torch.Tensor, int]]) -> None:
        self._model, self._answers = model, answers
        self._layers = list(model.model.layers)
        self._inputs: list[dict[int, torch.Tensor]] = [{} for _ in answers]
        """For each answer: layer number → the hidden states [1, P+R, H] that went into it, in the last full run."""
        self._extra: list[dict[str, object]] = [{} for _ in answers]
        """For each answer: what else a layer gets (positions, mask)."""

    @torch.inference_mode()
    def run(self, kept: list[int]) -> list[torch.Tensor]:
        """Give the log-probabilities [R, V] at each answer's response tokens, in fp32, and remember the way there."""
        return [self._run_one(answer, kept) for answer in range(len(self._answers))]

    @torch.inference_mode()
    def run_without(self, dropped: int, kept: list[int]) -> list[torch.Tensor]:
        """Give the same for the last run's layers without one."""
        later = [layer for layer in kept if layer > dropped]
        logprobs = []
        for answer in range(len(self._answers)):
            hidden = self._inputs[answer][dropped]
            for layer in later:
                hidden = self._layers[layer](hidden, **self._extra[answer])
            logprobs.append(self._project(answer, self._model.model.norm(hidden)))
        return logprobs

    def _run_one(self, answer: int, kept: list[int]) -> torch.Tensor:
        def remember(layer: int, args: tuple[torch.Tensor], extra: dict[str, object]) -> None:
            self._inputs[answer][layer], self._extra[answer] = args[0], extra

        hooks = [
            self._layers[i].register_forward_pre_hook(lambda _, *given, i=i: remember(i, *given), with_kwargs=True)
            for i in kept
        ]
        self._model.model.layers = nn.ModuleList([self._layers[i] for i in kept])
        self._model.config.num_hidden_layers = len(kept)  # the forward pass takes this many
        hidden = self._model.model(input_ids=self._answers[answer][0], use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return self._project(answer, hidden)

    def _project(self, answer: int, hidden: torch.Tensor) -> torch.Tensor:
        prompt_tokens = self._answers[answer][1]
        return self._model.lm_head(hidden[0, prompt_tokens - 1 : -1]).float().log_softmax(-1)


def forward_kl(teacher: list[torch.Tensor], student: list[torch.Tensor]) -> float:
    """Give KL(teacher ‖ student) in nats, the mean over all response tokens."""
    sums = [(t.exp() * (t - s)).sum().item() for t, s in zip(teacher, student, strict=True)]
    return sum(sums) / sum(len(t) for t in teacher)


def search(model: LlamaForCausalLM, answers: list[tuple[torch.Tensor, int]], steps: int) -> list[int]:
    """Drop `steps` layers one by one, print each step, and give their numbers in that order."""
    prober = Prober(model, answers)
    kept = list(range(model.config.num_hidden_layers))
    teacher = prober.run(kept)
    dropped = []
    print(
        "| layers left | dropped | forward KL | next best | its KL | seconds |\n|---|---|---|---|---|---|", flush=True
    )
    for _ in range(steps):
        started = time.monotonic()
        harm = {layer: forward_kl(teacher, prober.run_without(layer, kept)) for layer in kept}
        best, second = sorted(harm, key=harm.__getitem__)[:2]
        kept.remove(best)
        dropped.append(best)
        prober.run(kept)
        seconds = time.monotonic() - started
        print(
            f"| {len(kept)} | {best} | {harm[best]:.3f} | {second} | {harm[second]:.3f} | {seconds:.0f} |", flush=True
        )
    return dropped


def measure(model: LlamaForCausalLM, answers: list[tuple[torch.Tensor, int]], order: list[int]) -> None:
    """Drop the layers in this order and print each step."""
    prober = Prober(model, answers)
    kept = list(range(model.config.num_hidden_layers))
    teacher = prober.run(kept)
    print("| layers left | dropped | forward KL |\n|---|---|---|", flush=True)
    for layer in order:
        kept.remove(layer)
        print(f"| {len(kept)} | {layer} | {forward_kl(teacher, prober.run(kept)):.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:smollm2-135m-instruct", help="Llama-like HF model")
    parser.add_argument("--steps", type=int, default=10, help="layers to drop")
    parser.add_argument("--order", help="measure this order, as 3,25,26, instead of searching")
    parser.add_argument("--rows", type=int, default=6, help="worked answers to measure on")
    parser.add_argument("--seed", type=int, default=0, help="of the answers")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--out", type=Path, help="new folder for the cut model")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=args.dtype).eval()
    if not 0 < args.steps < model.config.num_hidden_layers - 1:
        raise ValueError(f"--steps is {args.steps}; {args.model} has {model.config.num_hidden_layers} layers")
    answers = read_answers(tokenizer, args.rows, args.seed)
    print(f"{args.model}, {args.rows} answers, {sum(ids.shape[1] - p for ids, p in answers)} response tokens\n")
    if args.order:
        dropped = [int(layer) for layer in args.order.split(",")]
        measure(model, answers, dropped)
    else:
        dropped = search(model, answers, args.steps)
        print(f"\ndropped, in this order: {', '.join(map(str, dropped))}")
    if args.out:
        args.out.mkdir(parents=True)
        drop_layers(folder, args.out, dropped)


if __name__ == "__main__":
    main()
